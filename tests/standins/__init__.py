"""Small packages that stand where the FlashAttention packages would: same names, owners and signatures, SDPA inside.

With one on PYTHONPATH and torch.cuda.is_available patched, transformers runs its real FlashAttention path on a CPU.
"""

from pathlib import Path

HERE = Path(__file__).parent
FA3, FA4, HUB_KERNELS = ((HERE / f"{name}.py").read_text() for name in ("fa3", "fa4", "hub_kernels"))


def distribution(folder: Path, name: str, version: str, top_level: str) -> None:
    """What pip leaves behind for a distribution that owns the module `top_level`."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "top_level.txt").write_text(top_level + "\n")


def module(folder: Path, dotted: str, source: str) -> None:
    """Writes the module, and beside it what the stand-ins share."""
    path = folder / (dotted.replace(".", "/") + ".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    (folder / "attend.py").write_text((HERE / "attend.py").read_text())


def fa3(folder: Path, source: str = FA3, version: str = "3.0.0") -> None:
    module(folder, "flash_attn_interface", source)
    distribution(folder, "flash-attn-3", version, "flash_attn_interface")


def fa4(folder: Path, source: str = FA4, version: str = "4.0.0b22") -> None:
    module(folder, "flash_attn.cute.__init__", source)  # flash_attn itself stays a namespace, as with the real wheel
    distribution(folder, "flash-attn-4", version, "flash_attn")
