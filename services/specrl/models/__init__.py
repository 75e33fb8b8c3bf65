"""Reads and checks Hugging Face model folders: JSON files and safetensors headers, without torch or weights.

Called by the trainer, by generation replicas, by the drafter's code and by preflight.
Imports only `files`, `tensor_files` and the spec.
"""

from specrl.models.model_folder import ModelFolder, read_model_folder
from specrl.models.run_models import RunModels, check, read_models, read_served_models

__all__ = ["ModelFolder", "RunModels", "check", "read_model_folder", "read_models", "read_served_models"]
