"""A sweep whose ranks torchrun starts: DeepSpeed's launcher imports all of DeepSpeed twice before they begin.

For tests of what the ranks and the sweep do; what the launcher does is tested with the launcher. Nor for a rank that
hangs: torchrun puts each rank into a session of its own, where the end of the launcher's group does not reach it.
"""

from __future__ import annotations

import sys

from harness.measure import lengths, sweep


def torchrun(script: str, flags: list[str], where: list[str], port: int) -> list[str]:
    command = [sys.executable, "-u", "-m", "torch.distributed.run", f"--nproc-per-node={where[1]}"]
    return [*command, f"--master-port={port}", script, *flags]


if __name__ == "__main__":
    lengths.launcher_command = torchrun
    sys.exit(sweep.main())
