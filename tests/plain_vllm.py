"""Serves an export with vLLM alone, from the `vllm serve` line that a run prints. It imports nothing of specrl.

    python tests/plain_vllm.py REQUEST RESULT

REQUEST is a JSON file: `line`, the command; `prompts`, user messages; `max_tokens`. RESULT gets the `texts`, the number
of `drafts` and of `accepted` draft tokens, and the modules of specrl that were `imported`. `run_line` runs this program
in a separate process.

vLLM's own parser of engine options parses the line, and `vllm.LLM` answers. The HTTP server of `vllm serve` is not
used: it needs a package that the locks leave out, and the tests do not depend on it. Decoding is greedy. On CPUs, vLLM
0.32 samples wrongly at a temperature above 0 when it speculates, unless specrl's plugin is loaded.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# For an engine of one thread that starts in seconds: no compilation, and little memory.
OPTIONS = ("--enforce-eager", "--max-num-seqs", "32", "--kv-cache-memory-bytes", str(1 << 26))
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class ServedTexts:
    """The completions. drafts: number of drafts made. accepted: number of draft tokens accepted."""

    texts: list[str]
    drafts: int
    accepted: int
    imported: list[str]

    @property
    def acceptance_length(self) -> float:
        """Mean number of tokens per verification."""
        return 1 + self.accepted / self.drafts


def run_line(line: str, prompts: Sequence[str], max_tokens: int, folder: Path) -> ServedTexts:
    """Answer user messages with the engine of a `vllm serve` line. folder: for files of the exchange."""
    request = folder / "request.json"
    result = folder / "result.json"
    request.write_text(json.dumps({"line": line, "prompts": list(prompts), "max_tokens": max_tokens}))
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "VLLM_PLUGINS": "",  # load no plugin, specrl's included
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, so that `imported` covers the engine, too
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",  # compiling the sampler would take twenty seconds
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [sys.executable, __file__, str(request), str(result)]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return ServedTexts(**json.loads(result.read_text()))


def main() -> None:
    from vllm import LLM, EngineArgs, SamplingParams
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    program, command, model, *options = shlex.split(request["line"])
    assert (program, command) == ("vllm", "serve")
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments = parser.parse_args(["--model", model, *options, *OPTIONS])
    llm = LLM(**vars(arguments) | {"disable_log_stats": False, "use_tqdm_on_load": False})
    chats = [[{"role": "user", "content": prompt}] for prompt in request["prompts"]]
    answers = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=request["max_tokens"]), use_tqdm=False)
    counts = {item.name: getattr(item, "value", None) for item in llm.get_metrics()}
    result = {
        "texts": [answer.outputs[0].text for answer in answers],
        "drafts": counts.get("vllm:spec_decode_num_drafts"),
        "accepted": counts.get("vllm:spec_decode_num_accepted_tokens"),
        "imported": sorted(name for name in sys.modules if name.partition(".")[0] == "specrl"),
    }
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
