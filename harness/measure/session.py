"""From settings to a built engine, and a clean end: what happens on every rank around the measured steps.

with session.run(settings, "sweep") as trainer:
    trainer.measure(seq_len=8192)
"""

import contextlib
import logging
import os
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from harness import flops, records
from harness.measure import attention, box, failures, formats, memory, model, result_file, runs, stack, telemetry
from harness.measure.launch import remove_shared_memory
from harness.measure.settings import Settings, fail_setting
from harness.measure.training import Trainer


class WrongSetting(RuntimeError):
    """A setting that only the built model or the number of ranks shows to be wrong."""

    kind = "wrong_setting"


def deepspeed_config(settings: Settings, device: str) -> dict:
    """DeepSpeed's config for these settings; nothing in it depends on the sequence length."""
    zero: dict = {"stage": settings.zero_stage}
    if settings.zero_stage:
        # Left out, DeepSpeed 0.19 overlaps only at stage 3 (zero/config.py), and stages 1 and 2 come out too slow.
        zero |= {"overlap_comm": True, "contiguous_gradients": True}
    if settings.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": device == "cuda"}
    config = {
        "train_micro_batch_size_per_gpu": settings.batch_size,
        "gradient_accumulation_steps": settings.grad_accum,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "gradient_clipping": 1.0,
        "steps_per_print": 2**31,
    }
    if settings.sp_size > 1:
        config["sequence_parallel_size"] = settings.sp_size
    return config


@contextlib.contextmanager
def run(settings: Settings, kind: str) -> Iterator[Trainer]:
    """Start the ranks' process group, build everything, write the run record; end cleanly or say why not.

    An error on any rank is written to the result file by that rank, printed, and ends the process at once, with exit
    code 2 for a wrong setting, else 1: a rank that waits for others in its teardown would hang them all.
    """
    stack.use_venv_extensions()
    device = box.use_accelerator()
    settings.resolve(device == "cuda")
    trainer = None
    try:
        trainer = start(settings, kind, device)
        yield trainer
        dist.barrier()
        trainer.sampler.close()
        dist.destroy_process_group()
        remove_shared_memory(os.environ["MASTER_PORT"])
    except Exception as error:
        rank = int(os.environ.get("RANK", 0))
        with contextlib.suppress(OSError):  # the disk may be what is full
            # On another node than rank 0's the file is not there, and standard error has to do.
            if settings.result_file and settings.result_file.exists():
                with result_file.Writer(settings.result_file) as out:
                    out.write(rank_error(error, rank, trainer))
        if trainer and settings.mem_debug:
            trainer.dump_memory()
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        remove_shared_memory(os.environ.get("MASTER_PORT", "none"))
        if failures.is_echo(str(error)):
            time.sleep(5)  # let the launcher see the rank that really died first
        os._exit(2 if getattr(error, "kind", None) == "wrong_setting" else 1)


def rank_error(error: Exception, rank: int, trainer: Trainer | None) -> records.RankError:
    return records.RankError(
        run_id=trainer.run.run_id if trainer else None,
        seq_len=trainer.seq_len if trainer else None,
        rank=rank,
        kind=getattr(error, "kind", None),
        error=stack.private(failures.named_line(error)),
        traceback=stack.private("".join(traceback.format_exception(error)[-8:])),
    )


def node_name() -> str:
    """This host's name, with the launcher's number of the node behind it when it gives one above 0."""
    number = os.environ.get("GROUP_RANK") or os.environ.get("CROSS_RANK") or "0"  # torchrun's, DeepSpeed's
    return socket.gethostname() + (f"#{number}" if number != "0" else "")


def share_sequences(built: torch.nn.Module, settings: Settings, backend: str):
    """DeepSpeed Ulysses: SP_SIZE ranks share each sequence, exchanging heads for tokens around the attention.

    Changes the attention function for the whole process. Returns the groups that deepspeed.initialize wants.
    """
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    try:
        return UlyssesSPAttentionHF.register_with_transformers(
            built, attention.BACKENDS[backend], settings.sp_size, settings.batch_size, seq_length_is_variable=True
        )
    except (ValueError, AttributeError) as error:
        raise WrongSetting(f"SP_SIZE={settings.sp_size}: {error}") from error


def start(settings: Settings, kind: str, device: str) -> Trainer:
    """Everything up to the first step, in an order in which the cheap things fail first."""
    # DeepSpeed's collectives under their old names; nothing a user can act on.
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if device == "cuda":
        torch.cuda.set_device(local_rank)  # before torchao is imported, which asks about the current device
    for name in ("torchao", "torch.utils._pytree"):  # torchao warns of kernels for other GPUs, torch of torchao
        logging.getLogger(name).setLevel(logging.ERROR)
    import deepspeed  # and with it transformers, and with that torchao

    facts = box.device_facts(device, local_rank)
    if why := formats.refusal(settings, facts["capability"]):
        fail_setting(why)
    converter = formats.converter(settings.dtype, facts["capability"])
    backend = attention.choose(settings.attn, facts["capability"])
    if settings.doc_len:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)  # torchrun's, DeepSpeed's
        share = facts["memory_gib"] / (ranks if device == "cpu" else 1)
        backend = attention.for_documents(backend, facts["capability"], max(settings.lengths), share)
    attention.require(backend, facts["capability"])
    torch.use_deterministic_algorithms(settings.deterministic, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would add a fill to every torch.empty

    deepspeed.init_distributed()
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, facts | {"node": node_name()})
    gpu = box.gpu_record(device, everyone, settings.peak_tflops, settings.dtype)
    if dist.get_world_size() % settings.sp_size or any(n % settings.sp_size for n in settings.lengths):
        raise WrongSetting(f"SP_SIZE={settings.sp_size} must divide the {dist.get_world_size()} ranks and every length")

    config = deepspeed_config(settings, device)
    built = model.build(settings, backend, device, config if settings.zero_stage == 3 else None)
    fmt = formats.convert(built.model, settings.dtype, facts["capability"], converter) if converter else None
    if fmt and not fmt.emulated and not settings.compile:
        built.notes.append(
            f"{fmt.name} without COMPILE=1: its casts are kernels of their own and may cost what it saves"
        )
    where = f"cuda:{local_rank}" if device == "cuda" else "cpu"
    probe = attention.probe(backend, where, *model.attention_shape(built.model.config))
    engine, optimizer, *_ = deepspeed.initialize(
        model=built.model,
        model_parameters=built.model.parameters(),
        config=config,
        mpu=share_sequences(built.model, settings, backend) if settings.sp_size > 1 else None,
    )
    if settings.compile:
        engine.compile()
    known = {
        "name": settings.recipe_name,
        "dtype": settings.dtype.replace("bf16", "bfloat16"),
        "liger_applied": built.liger_applied,
        "optimizer": type(getattr(optimizer, "optimizer", optimizer)).__name__,
    }
    recipe = records.Recipe(**settings.model_dump(include=set(records.Recipe.model_fields)) | known)

    nodes = [f["node"] for f in everyone]
    run = runs.run_record(
        kind,
        settings,
        gpu,
        backend,
        sweep_key=settings.sweep_key,
        host=stack.host(list(dict.fromkeys(nodes))),
        world_size=dist.get_world_size(),
        attention=records.Attention(
            requested=settings.attn, backend=backend, function=probe.function, kernels=probe.kernels
        ),
        model=built.record,
        recipe=recipe,
        format=fmt,
        flop_convention=flops.CONVENTION,
        memory_source=memory.SOURCE[device],
        notes=built.notes,
    )
    out = None
    if dist.get_rank() == 0:
        path = settings.result_file or result_file.new(settings.results, gpu.name if device == "cuda" else "cpu", kind)
        out = result_file.Writer(path)
        settings.result_file = path
        out.write(run)
    shared = [str(settings.result_file), run.run_id]
    dist.broadcast_object_list(shared, src=0)
    settings.result_file, run.run_id = Path(shared[0]), shared[1]
    return Trainer(
        settings=settings, device=device, engine=engine, run=run, out=out,
        sampler=telemetry.Sampler(facts["uuid"]),
        vocab=built.model.config.get_text_config().vocab_size, node_of_rank=nodes,
    )  # fmt: skip
