"""A run's checkpoints on disks and in object stores: names and paths, checksums, mirrors, exports.

Called by the trainer's service, its Megatron backend, the launcher and the command line. Nothing here imports Megatron,
and only `checkpoint_export` and `hf_folder` import torch.
"""
