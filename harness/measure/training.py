"""One DeepSpeed training step, built and measured: what benchmark.py and bench_decompose.py share.

    with training.session(settings, "sweep") as trainer:
        trainer.measure(seq_len=8192)

A step is GRAD_ACCUM times forward and backward, then the optimizer. Its time is device-synchronised wall clock,
the slowest rank's. The batch is made and copied before; what is gathered and written comes after.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import socket
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from harness import flops, records, stats
from harness.measure import attention, box, failures, memory, model, runs, stack, telemetry
from harness.measure.settings import Settings

DRIFT = 0.10  # warm-up goes on while a step differs by more than this from the one before ...
MAX_EXTRA_WARMUP = 5  # ... but not for more than so many steps
MIN_STEPS, MIN_SECONDS = 3, 30  # before PRECISION may end a length


class NonFiniteLoss(RuntimeError):
    kind = "non_finite_loss"


class WrongSetting(RuntimeError):
    """A setting that only the built model or the number of ranks shows to be wrong."""

    kind = "wrong_setting"


def deepspeed_config(settings: Settings, device: str) -> dict:
    """DeepSpeed's config for these settings; nothing in it depends on the sequence length."""
    zero: dict = {"stage": settings.zero_stage}
    if settings.zero_stage == 3:
        # transformers reads these for ZeRO-3; the defaults would be the same for every model size.
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


@dataclass
class Trainer:
    """A built engine and all that describes it. `out` is None on every rank but the first."""

    settings: Settings
    device: str
    engine: torch.nn.Module
    run: records.Run
    sampler: telemetry.Sampler
    vocab: int
    node_of_rank: list[str]
    out: records.Writer | None
    seq_len: int | None = None  # the one being measured, for the error record

    @property
    def rank(self) -> int:
        return dist.get_rank()

    def make_batch(self, seq_len: int) -> dict:
        """Random tokens on the device, (batch, seq_len), as the model's keyword arguments; other ones on each rank.

        With DOC_LEN position ids restart at each document, FlashAttention gets its int32 offsets, and the first
        label of each document is masked, since it would be predicted from the document before.
        """
        sp = self.settings.sp_size
        generator = torch.Generator().manual_seed(self.settings.seed * 1009 + self.rank // sp)
        ids = torch.randint(self.vocab, (self.settings.batch_size, seq_len), generator=generator)
        batch = {"input_ids": ids, "labels": ids.clone(), "position_ids": torch.arange(seq_len)[None].expand_as(ids)}
        kwargs: dict = {"use_cache": False}
        if sp > 1:
            # Ulysses: each rank gets its part of the sequence, so the label of its last token must come along. The
            # loss is a sum over a common denominator: its mean over the ranks is the whole sequence's.
            batch["labels"] = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
            part = slice(self.rank % sp * seq_len // sp, (self.rank % sp + 1) * seq_len // sp)
            batch = {k: v[:, part] for k, v in batch.items()}
            batch["shift_labels"] = batch["labels"]
            kwargs["num_items_in_batch"] = self.settings.batch_size * (seq_len - 1) / sp
        if self.settings.doc_len:
            starts = torch.arange(0, seq_len, self.settings.doc_len)
            lengths = torch.diff(starts, append=torch.tensor([seq_len]))
            batch["position_ids"] = torch.cat([torch.arange(n) for n in lengths.tolist()])[None]
            batch["labels"][:, starts] = -100
            if self.run.attention.backend != "sdpa":  # sdpa makes its mask from the position ids
                offsets = torch.cat([starts, torch.tensor([seq_len])]).int()
                longest = int(lengths.max())  # a Python int: a tensor would cost a host sync per layer, or a compile
                batch |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
                kwargs |= {"max_length_q": longest, "max_length_k": longest}
        return {k: v.to(self.device) for k, v in batch.items()} | kwargs

    def step(self, batch: dict, mark=None) -> torch.Tensor:
        """One optimizer step; the last micro-step's loss, on the device. `mark(name)` is called at each border."""
        mark = mark or (lambda name: None)
        for _ in range(self.settings.grad_accum):
            mark("forward")
            loss = self.engine(**batch).loss
            mark("backward")
            self.engine.backward(loss)
            mark("optimizer")
            self.engine.step()
        mark("end")
        return loss

    def timed_step(self, batch: dict, seq_len: int, number: int, warmup: bool) -> records.Step:
        """Run one step between two device synchronisations and gather every rank's figures into one record."""
        clock = memory.PhaseClock(self.device)
        dist.barrier()  # a rank that comes late would be measured as communication by the others
        self.sampler.take()
        retries = memory.alloc_retries(self.device)
        memory.synchronize(self.device)
        start = time.perf_counter()
        loss = self.step(batch, clock.mark)
        memory.synchronize(self.device)
        elapsed_ms = (time.perf_counter() - start) * 1e3
        peak = memory.peak_gib(self.device)
        mine = {
            "ms": elapsed_ms,
            "loss": loss.item(),
            "reserved": peak.reserved,
            "allocated": peak.allocated,
            "retries": None if retries is None else memory.alloc_retries(self.device) - retries,
            **clock.phases_ms(),
            **self.sampler.take(),
        }
        return self._step_record(gather(mine, self.device), seq_len, number, warmup)

    def _step_record(self, ranks: list[dict], seq_len: int, number: int, warmup: bool) -> records.Step:
        def over(key, combine):
            values = [r[key] for r in ranks if r[key] is not None]
            return combine(values) if values else None

        slowest = max(range(len(ranks)), key=lambda i: ranks[i]["ms"])
        ms = ranks[slowest]["ms"]
        losses = [r["loss"] for r in ranks]
        if None in losses:
            raise NonFiniteLoss(f"the loss is not finite at step {number}: speed with NaN or Inf is not to be trusted")
        by_node = {n: [r for r, m in zip(ranks, self.node_of_rank, strict=True) if m == n] for n in self.node_of_rank}
        states = {n: telemetry.combine(rs) for n, rs in by_node.items()}
        return records.Step(
            run_id=self.run.run_id,
            seq_len=seq_len,
            step=number,
            warmup=warmup,
            exec_time_ms=rounded(ms),
            peak_mem_gib=rounded(over("reserved", max)),
            peak_allocated_gib=rounded(over("allocated", max)),
            loss=rounded(sum(losses) / len(losses)),
            alloc_retries=over("retries", sum),
            fastest_rank_ms=rounded(over("ms", min)),
            slowest_rank=slowest,
            forward_ms=rounded(ranks[slowest]["forward"]),
            backward_ms=rounded(ranks[slowest]["backward"]),
            optimizer_ms=rounded(ranks[slowest]["optimizer"]),
            gpu_state=telemetry.combine(ranks),
            node_states={n: s for n, s in states.items() if s} if len(states) > 1 else None,
            **self.rates(seq_len, ms),
        )

    def count(self, seq_len: int) -> flops.Count | None:
        """Model TFLOP per GPU and step, None where the model's cannot be counted."""
        return flops.step_work(self.run, seq_len)

    def tokens(self, seq_len: int) -> float:
        """Tokens per GPU and step."""
        return seq_len * self.settings.batch_size * self.settings.grad_accum / self.settings.sp_size

    def rates(self, seq_len: int, ms: float) -> dict:
        count, peak = self.count(seq_len), self.run.gpu.peak_tflops
        tflops = count.total_tflop / ms * 1e3 if count else None
        return {
            "tflops": rounded(tflops),
            "mfu": rounded(tflops / peak) if tflops and peak else None,
            "tokens_per_s_per_gpu": rounded(self.tokens(seq_len) / ms * 1e3),
        }

    def write(self, record: records.Base) -> None:
        """To the result file, and to standard output for who watches. Only rank 0 has a file."""
        if self.out:
            self.out.write(record)
            print(records.dump(record), flush=True)

    def warm_up(self, batch: dict, seq_len: int) -> list[records.Step]:
        """WARMUP_STEPS steps, then more while they drift (compilation, clocks, allocator); every rank does as many."""
        steps: list[records.Step] = []
        wanted = self.settings.warmup_steps
        while len(steps) < wanted or (wanted and len(steps) < wanted + MAX_EXTRA_WARMUP and drifting(steps)):
            steps.append(self.timed_step(batch, seq_len, len(steps), warmup=True))
            self.write(steps[-1])
        return steps

    def measure(self, seq_len: int) -> records.Summary:
        """Warm up, measure and write one length."""
        self.seq_len = seq_len
        if self.settings.compile:
            torch._dynamo.reset()  # else a second length would run a kernel made for any length
        memory.reset(self.device)
        if self.settings.mem_debug:
            memory.start_history(self.device)
        batch = self.make_batch(seq_len)
        if self.settings.mem_debug:
            self.step(batch, lambda stage: self._print_memory(seq_len, stage))
        warm = self.warm_up(batch, seq_len)
        gc.collect()
        memory.reset(self.device)  # the peak is of the steps, not of loading or compiling
        steps, stopped_by = [], "steps"
        for number in range(len(warm), len(warm) + self.settings.steps):
            steps.append(self.timed_step(batch, seq_len, number, warmup=False))
            self.write(steps[-1])
            if self._precise([s.exec_time_ms for s in steps]):
                stopped_by = "precision"
                break
        summary = self.summarise(seq_len, warm, steps, stopped_by)
        self.write(summary)
        if self.settings.mem_debug:
            self.dump_memory()
        return summary

    def _precise(self, times: list[float]) -> bool:
        if not self.settings.precision or len(times) < MIN_STEPS or sum(times) < MIN_SECONDS * 1e3:
            return False
        median, low, high = stats.median_interval(times)
        return low is not None and (high - low) / 2 <= median * self.settings.precision / 100

    def summarise(self, seq_len: int, warm: list, steps: list, stopped_by: str) -> records.Summary:
        times = [s.exec_time_ms for s in steps]
        median, low, high = stats.median_interval(times)
        half = len(times) // 2
        drift = abs(statistics.median(times[:half]) - statistics.median(times[-half:])) / median if half > 1 else 0
        throttles = [s.gpu_state.throttle for s in steps if s.gpu_state and s.gpu_state.throttle is not None]
        energies = [s.gpu_state.energy_j if s.gpu_state else None for s in steps]
        tokens = self.tokens(seq_len) * self.run.world_size * len(steps)
        count = self.count(seq_len)
        peaks = [s.peak_allocated_gib for s in steps]
        return records.Summary(
            run_id=self.run.run_id,
            seq_len=seq_len,
            n=len(times),
            median_ms=rounded(median),
            ci_low_ms=rounded(low),
            ci_high_ms=rounded(high),
            min_ms=min(times),
            max_ms=max(times),
            peak_mem_gib=max((s.peak_mem_gib for s in steps if s.peak_mem_gib is not None), default=None),
            peak_allocated_gib=None if None in peaks else max(peaks),
            attention_tflop=count and rounded(count.attention_tflop),
            dense_tflop=count and rounded(count.dense_tflop),
            warmup_steps=len(warm),
            steady=not (warm and drifting(warm)) and drift <= DRIFT / 2 and not any(s.alloc_retries for s in steps),
            throttled=any(telemetry.TROUBLE & set(t) for t in throttles) if throttles else None,
            joules_per_token=None if None in energies else rounded(sum(energies) / tokens),
            stopped_by=stopped_by,
            **self.rates(seq_len, median),
        )

    def _print_memory(self, seq_len: int, stage: str) -> None:
        if self.rank == 0:
            before = {"forward": "start", "backward": "after forward", "optimizer": "after backward"}
            now = memory.current_gib(self.device)
            place = before.get(stage, "after optimizer")
            print(f"# memory seq_len={seq_len} {place}: allocated {now.allocated} GiB, reserved {now.reserved} GiB")

    def dump_memory(self) -> None:
        """The allocator's history of this length beside the result file, on rank 0 (MEM_DEBUG)."""
        if self.out:
            path = self.out.path.with_name(f"{self.out.path.stem}_memory_{self.seq_len}.pickle")
            said = memory.dump_history(self.device, path)
            print(f"# {said}", flush=True)


def drifting(steps: list[records.Step]) -> bool:
    """Whether the last step differs from the one before by more than DRIFT; one alone cannot be told from a first."""
    if len(steps) < 2:
        return True
    last, before = steps[-1].exec_time_ms, steps[-2].exec_time_ms
    return abs(last - before) > DRIFT * before


def rounded(value: float | None) -> float | None:
    """Seven significant digits: more is noise, and the lines stay readable."""
    return None if value is None else float(f"{value:.7g}")


def gather(mine: dict[str, float | None], device: str) -> list[dict[str, float | None]]:
    """Every rank's figures, in rank order, with one collective; what is not finite comes out as None."""
    keys = sorted(mine)
    row = torch.tensor([math.nan if mine[k] is None else float(mine[k]) for k in keys], dtype=torch.float64)
    rows = [torch.empty_like(row, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row.to(device))
    return [{k: v if math.isfinite(v) else None for k, v in zip(keys, r.tolist(), strict=True)} for r in rows]


@contextlib.contextmanager
def session(settings: Settings, kind: str) -> Iterator[Trainer]:
    """Start the ranks' process group, build everything, write the run record; end cleanly or say why not.

    An error on any rank is written to the result file by that rank, printed, and ends the process at once with
    exit code 1: a rank that waits for others in its teardown would hang them all.
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
    except Exception as error:
        rank = int(os.environ.get("RANK", 0))
        with contextlib.suppress(OSError):  # the disk may be what is full
            if trainer and settings.mem_debug:
                trainer.dump_memory()
            # On another node than rank 0's the file is not there, and standard error has to do.
            if settings.result_file and settings.result_file.exists():
                with records.Writer(settings.result_file) as out:
                    out.write(rank_error(error, rank, trainer))
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        if failures.is_echo(str(error)):
            time.sleep(5)  # let the launcher see the rank that really died first
        os._exit(1)


def rank_error(error: Exception, rank: int, trainer: Trainer | None) -> records.RankError:
    first = f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"
    return records.RankError(
        run_id=trainer.run.run_id if trainer else None,
        seq_len=trainer.seq_len if trainer else None,
        rank=rank,
        kind=getattr(error, "kind", None),
        error=stack.private(first),
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
    import deepspeed

    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    facts = box.device_facts(device, local_rank)
    backend = attention.choose(settings.attn, facts["capability"])
    attention.require(backend, facts["capability"])
    torch.use_deterministic_algorithms(settings.deterministic, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would add a fill to every torch.empty

    deepspeed.init_distributed()
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, facts | {"node": node_name()})
    gpu = box.gpu_record(device, everyone, settings.peak_tflops)
    if dist.get_world_size() % settings.sp_size or any(n % settings.sp_size for n in settings.lengths):
        raise WrongSetting(f"SP_SIZE={settings.sp_size} must divide the {dist.get_world_size()} ranks and every length")

    config = deepspeed_config(settings, device)
    built = model.build(settings, backend, device, config if settings.zero_stage == 3 else None)
    described = model.record(built, settings)
    text = built.config.get("text_config") or built.config
    heads = text.get("num_attention_heads") or text.get("n_head")
    probe = attention.probe(
        backend,
        f"cuda:{local_rank}" if device == "cuda" else "cpu",
        heads,
        text.get("num_key_value_heads") or heads,
        text.get("head_dim") or (text.get("hidden_size") or text.get("n_embd")) // heads,
    )
    engine, optimizer, *_ = deepspeed.initialize(
        model=built.model,
        model_parameters=built.model.parameters(),
        config=config,
        mpu=share_sequences(built.model, settings, backend) if settings.sp_size > 1 else None,
    )
    if settings.compile:
        engine.compile()
    basic = getattr(optimizer, "optimizer", optimizer)
    recipe = records.Recipe(
        name=settings.recipe_name,
        liger_applied=built.liger_applied,
        optimizer=type(basic).__name__,
        **{k: getattr(settings, k) for k in records.Recipe.model_fields if hasattr(settings, k)},
    )

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
        model=described,
        recipe=recipe,
        flop_convention=flops.CONVENTION,
        memory_source=memory.SOURCE[device],
        notes=built.notes,
    )
    out = None
    if dist.get_rank() == 0:
        path = settings.result_file or records.new_file(settings.results, gpu.name if device == "cuda" else "cpu", kind)
        out = records.Writer(path)
        settings.result_file = path
        out.write(run)
    shared = [str(settings.result_file), run.run_id]
    dist.broadcast_object_list(shared, src=0)
    settings.result_file, run.run_id = Path(shared[0]), shared[1]
    return Trainer(
        settings=settings, device=device, engine=engine, run=run, out=out,
        sampler=telemetry.Sampler(facts["uuid"]),
        vocab=text["vocab_size"], node_of_rank=nodes,
    )  # fmt: skip
