"""One DeepSpeed training step, measured: what benchmark.py and bench_decompose.py share. session.py builds it.

A step is GRAD_ACCUM times forward and backward, then the optimizer. Its time is device-synchronised wall clock,
the slowest rank's. The batch is made and copied before; what is gathered and written comes after.
"""

import gc
import math
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from harness import flops, records, stats
from harness.measure import memory, result_file, telemetry
from harness.measure.settings import Settings

MAX_EXTRA_WARMUP = stats.MAX_STARTUP  # steps of warm-up beyond those asked for, while they drift
MIN_SECONDS = 30  # of timed steps before PRECISION may end a length


class NonFiniteLoss(RuntimeError):
    kind = "non_finite_loss"


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
    out: result_file.Writer | None
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
            if self.run.attention.backend != "sdpa":  # that one, on a CPU, makes its mask from the position ids
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
        self.sampler.take()  # NVML answers each rank after another while, so before they meet
        retries = memory.alloc_retries(self.device)
        dist.barrier()  # a rank that comes late would be measured as communication by the others
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
            values = telemetry.told(ranks, key)
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
            **{f"{phase}_ms": rounded(ranks[slowest][phase]) for phase in memory.PHASES},
            gpu_state=telemetry.combine(ranks),
            node_states={n: s for n, s in states.items() if s} if len(states) > 1 else None,
            **self.rates(seq_len, ms),
        )

    def rates(self, seq_len: int, ms: float) -> dict:
        count, peak = flops.step_work(self.run, seq_len), self.run.gpu.peak_tflops
        tflops = count.total_tflop / ms * 1e3 if count else None
        return {
            "tflops": rounded(tflops),
            "mfu": rounded(tflops / peak) if tflops and peak else None,
            "tokens_per_s_per_gpu": rounded(flops.step_tokens(self.run, seq_len) / ms * 1e3),
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
            if self._enough([s.exec_time_ms for s in steps]):
                stopped_by = "precision"
                break
        summary = self.summarise(seq_len, warm, steps, stopped_by)
        self.write(summary)
        if self.settings.mem_debug and self.rank == 0:
            self.dump_memory()
        return summary

    def _enough(self, times: list[float]) -> bool:
        if not self.settings.precision or sum(times) < MIN_SECONDS * 1e3:
            return False
        return len(times) >= stats.steps_needed(times, self.settings.precision / 100)

    def summarise(self, seq_len: int, warm: list, steps: list, stopped_by: str) -> records.Summary:
        times = [s.exec_time_ms for s in steps]
        median, low, high = stats.median_interval(times)
        throttles = [s.gpu_state.throttle for s in steps if s.gpu_state and s.gpu_state.throttle is not None]
        energies = [s.gpu_state.energy_j if s.gpu_state else None for s in steps]
        tokens = flops.step_tokens(self.run, seq_len) * self.run.world_size * len(steps)
        count = flops.step_work(self.run, seq_len)
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
            steady=not (warm and drifting(warm)) and stats.steady(times) and not any(s.alloc_retries for s in steps),
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
        """This rank's allocator history of this length, beside the result file (MEM_DEBUG)."""
        file = self.settings.result_file
        path = file.with_name(f"{file.stem}_memory_{self.seq_len}_rank{self.rank}.pickle")
        print(f"# {memory.dump_history(self.device, path)}", flush=True)


def drifting(steps: list[records.Step]) -> bool:
    """Whether the last step differs from the one before by more than DRIFT; one alone cannot be told from a first."""
    if len(steps) < 2:
        return True
    return stats.drifts(steps[-1].exec_time_ms, steps[-2].exec_time_ms)


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
