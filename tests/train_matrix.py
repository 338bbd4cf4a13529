"""Run by test_training.py under torchrun: many recipes in one pair of ranks. Prints one JSON line per case, and one
per rank on the memory that loading a large model took."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from pathlib import Path

import torch.distributed as dist

from harness.measure import box, model, session, stack
from harness.measure.launch import remove_shared_memory
from harness.measure.settings import Settings


def losses(name: str, results: Path, seq_len: int = 64, **settings) -> None:
    chosen = Settings(
        _cli_parse_args=[], results=results, steps=2, warmup_steps=1, precision=0, seq_len=seq_len, **settings
    ).resolve(False)
    trainer = session.start(chosen, "sweep", "cpu")
    summary = trainer.measure(seq_len)
    if trainer.out:
        lines = [json.loads(line) for line in trainer.out.path.read_text().splitlines()]
        print("CASE " + json.dumps({"name": name, "records": lines, "n": summary.n}), flush=True)


def resident_mib() -> tuple[float, float]:
    """(anonymous, of mapped files) memory of this process."""
    status = Path("/proc/self/status").read_text()
    return tuple(int(re.search(rf"{key}:\s+(\d+)", status)[1]) / 1024 for key in ("RssAnon", "RssFile"))


def loading(large: str) -> None:
    """Load real weights under ZeRO-3 and print how much this rank's memory grew: at the end, and at most."""
    import deepspeed

    deepspeed.init_distributed()
    chosen = Settings(_cli_parse_args=[], recipe="short-context", zero_stage=3, model=large, seq_len=64).resolve(False)
    before, seen, done = resident_mib(), [], threading.Event()

    def watch():
        while not done.wait(0.005):
            seen.append(resident_mib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    built = model.build(chosen, "sdpa", "cpu", session.deepspeed_config(chosen, "cpu"))
    done.set()
    watcher.join()
    seen.append(resident_mib())
    anonymous, mapped = ([s[i] - before[i] for s in seen] for i in (0, 1))
    grown = {"rank": dist.get_rank(), "model_mib": built.record.parameters * 2 / 2**20, "anonymous": anonymous[-1]}
    print("LOADED " + json.dumps(grown | {"peak_anonymous": max(anonymous), "mapped": max(mapped)}), flush=True)


def main() -> None:
    results, real, large = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    stack.use_venv_extensions()
    box.use_accelerator()
    loading(large)
    short = {"recipe": "short-context"}
    losses("zero2", results, **short)
    losses("zero2 checkpointing", results, **short, grad_checkpoint=True)
    losses("zero2 offload", results, **short, offload_optimizer=True)
    losses("zero2 accumulation", results, **short, grad_accum=2)
    losses("zero2 packing", results, **short, doc_len=20)
    losses("zero3", results, **short, zero_stage=3)
    losses("zero3 everything", results, grad_accum=2, doc_len=20)
    losses("layers", results, **short, num_layers=2)
    losses("real unsharded", results, **short, model=real)
    losses("real sharded", results, **short, zero_stage=3, model=real)
    losses("real unsharded whole recipe", results, zero_stage=2, model=real, doc_len=20)
    losses("real sharded whole recipe", results, model=real, doc_len=20)
    losses("fp8", results, **short, model=real, dtype="fp8")
    losses("fp8 rowwise", results, **short, model=real, dtype="fp8_rowwise")
    losses("fp8 whole recipe", results, model=real, doc_len=20, dtype="fp8")
    losses("fp8 unsharded whole recipe", results, zero_stage=2, model=real, doc_len=20, dtype="fp8")
    # Last: it changes the attention of the whole process.
    losses("sequence parallel", results, model=real, sp_size=2)
    dist.barrier()
    dist.destroy_process_group()
    remove_shared_memory(os.environ["MASTER_PORT"])


if __name__ == "__main__":
    main()
