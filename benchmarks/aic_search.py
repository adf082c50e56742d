"""AIConfigurator 0.12's own search beside `fp8plan tune`: what each recommends, and what that takes in the simulator.

    make .venv-aic/.installed && .venv-aic/bin/python benchmarks/aic_search.py
    python -m benchmarks.aic_search --simulate      after a change of the model: AIConfigurator's answers stay

writes benchmarks/results/aic_search.jsonl, one row for each recommendation. AIConfigurator is asked as its users do
(`aiconfigurator cli default`), for a checkpoint in BF16 and for one in FP8 blocks, at the batch's mean lengths. It gets
its default targets of latency and, again, none. The rows have the limits that it writes for vLLM, and those with its
batch size as max_num_seqs. fp8plan simulates the batch on each. Where its engine has a shorter max_model_len than the
batch needs, the batch's is taken. All seconds are modelled by fp8plan; none was measured.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.tables import markdown
from fp8plan import jsonl
from fp8plan.model.configs import find_config
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.planner import predict
from fp8plan.model.plan.request import PlanRequest
from fp8plan.model.tune.request import TuneRequest
from fp8plan.model.tune.search import search
from fp8plan.model.workload import Fixed, LogNormal, Workload

VERSION = "0.26.0"
RESULTS = Path(__file__).parent / "results" / "aic_search.jsonl"
FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
CHECKPOINTS: dict[str, dict[str, Any]] = {"bf16": {}, "fp8_block": {"quantization_config": FP8_BLOCKS}}
TARGETS = {"its default targets": {}, "no targets": {"ttft": 1e7, "tpot": 1e5}}  # milliseconds


@dataclass(frozen=True)
class Case:
    """A batch on some GPUs."""

    model: str
    gpu: str
    gpus: int
    workload: Workload

    @property
    def name(self) -> str:
        work, batch = self.workload, self.workload.batch()
        lengths = f"{work.prompts} x {work.samples_per_prompt} of {batch.responses.mean():,.0f} tokens on average"
        return f"{self.model}, {self.gpus} x {self.gpu}, {lengths}"

    @property
    def known(self) -> dict[str, Any]:
        """Arguments of a plan: the engine's version, and more than one GPU."""
        return {"engine_version": VERSION} | ({"gpus": self.gpus} if self.gpus > 1 else {})


LONG = LogNormal(6000, 0.9, 20480)
CASES = (
    Case("Qwen/Qwen3-8B", "h200_sxm", 1, Workload(32, 16, Fixed(1024), LONG)),
    Case("Qwen/Qwen3-8B", "h100_sxm", 8, Workload(512, 16, Fixed(1024), LONG)),
    Case("Qwen/Qwen3-1.7B", "h100_sxm", 1, Workload(48, 16, Fixed(64), Fixed(256))),
)


def recommended(case: Case, precision: str, targets: Mapping[str, float]) -> dict[str, Any]:
    """The first of its aggregated deployments: its parallelism, batch size and tokens/s, and vLLM's flags.

    Raises RuntimeError if it has none.
    """
    import aic
    import yaml
    from aiconfigurator.cli.api import cli_default

    batch = case.workload.batch()
    with TemporaryDirectory(prefix="aiconfigurator-") as folder:
        model = Path(folder, "models", case.model)
        model.mkdir(parents=True)
        config = {name: value for name, value in find_config(case.model)[0].items() if not name.startswith("_")}
        (model / "config.json").write_text(json.dumps(config | CHECKPOINTS[precision]))
        answer = cli_default(
            str(model),
            case.gpus,
            case.gpu,
            backend="vllm",
            backend_version=aic.database_version(case.gpu, "vllm"),
            isl=round(float(batch.prompts.mean())),
            osl=round(float(batch.responses.mean())),
            top_n=1,
            save_dir=str(Path(folder, "saved")),
            **targets,
        )
        best = answer.best_configs.get("agg")
        files = sorted(Path(folder, "saved").glob("*/agg/top1/k8s_deploy.yaml"))
        if best is None or not len(best) or not files:
            raise RuntimeError("AIConfigurator has no aggregated deployment")
        worker = yaml.safe_load(files[0].read_text())["spec"]["services"]["VllmWorker"]
    words = worker["extraPodSpec"]["mainContainer"]["args"]
    flags = dict(zip(words[::2], words[1::2], strict=True))
    row = best.iloc[0]
    return {
        "tensor_parallel_size": int(flags["--tensor-parallel-size"]),
        "data_parallel_size": case.gpus // int(flags["--tensor-parallel-size"]),
        "max_num_seqs": int(flags["--max-num-seqs"]),
        "max_num_batched_tokens": int(flags["--max-num-batched-tokens"]),
        "batch_size": int(row["bs"]),
        "its_tokens_per_s_per_gpu": round(float(row["tokens/s/gpu"]), 1),
        "its_precision": f"{row['gemm']}, KV {row['kvcache']}",
    }


def simulated(case: Case, precision: str, **limits: Any) -> float:
    """fp8plan's seconds of the case's batch on engines with these limits."""
    asked = EngineLimits.for_gpu(find_gpu(case.gpu), **limits)
    known: dict[str, Any] = {"precisions": [precision], "engine_version": VERSION}
    return predict(PlanRequest(case.model, case.gpu, case.workload, limits=asked, **known)).chosen.timed.makespan_s


LIMITS = ("tensor_parallel_size", "data_parallel_size", "max_num_seqs", "max_num_batched_tokens")


def rows(case: Case) -> Iterator[dict[str, Any]]:
    """vLLM's own limits, the recommendations of AIConfigurator, and those of fp8plan."""
    yield own_limits(case)
    for precision in CHECKPOINTS:
        for name, targets in TARGETS.items():
            start = time.perf_counter()
            its = recommended(case, precision, targets)
            took = {"took_s": round(time.perf_counter() - start, 2)}
            common = {"precision": precision, **{x: its[x] for x in LIMITS}}
            written = simulated(case, precision, **{x: its[x] for x in LIMITS})
            yield {"by": f"AIConfigurator, {name}", **common, "seconds": written, **its, **took}
            fewer = {"max_num_seqs": max(1, its["batch_size"])}
            seconds = simulated(case, precision, **{x: its[x] for x in LIMITS} | fewer)
            yield {"by": f"AIConfigurator, {name}, its batch size", **common, **fewer, "seconds": seconds}
    yield from tuned(case)


def own_limits(case: Case) -> dict[str, Any]:
    """The row of vLLM's own limits."""
    planned = predict(PlanRequest(case.model, case.gpu, case.workload, precisions=["bf16"], **case.known)).chosen
    return _row("vLLM's own limits, best layout", planned)


def tuned(case: Case) -> Iterator[dict[str, Any]]:
    """The rows of `fp8plan tune`."""
    for precisions in (["bf16"], ["bf16", "fp8_block"], None):
        start = time.perf_counter()
        best = search(TuneRequest(case.model, case.gpu, case.workload, precisions=precisions, **case.known)).best.chosen
        words = "all precisions" if precisions is None else " or ".join(precisions)
        yield _row(f"fp8plan tune, {words}", best) | {"took_s": round(time.perf_counter() - start, 2)}


def _row(by: str, candidate: Any) -> dict[str, Any]:
    limits = candidate.setup.limits
    graphs = {"max_cudagraph_capture_size": limits.max_cudagraph_capture_size}
    named = {x: getattr(limits, x) for x in LIMITS} | graphs
    return {"by": by, "precision": candidate.setup.precision.name, **named, "seconds": candidate.timed.makespan_s}


def table() -> str:
    """The committed rows in Markdown. Recommendations that are the same with and without targets stand once."""
    cells, seen = [], set[Any]()
    for row in jsonl.rows(RESULTS):
        same = (row["case"], row["precision"], *(row[x] for x in LIMITS))
        if row["by"].startswith("AIConfigurator") and same in seen:
            continue
        case = "" if any(key[0] == row["case"] for key in seen) else row["case"]
        seen.add(same)
        layout = f"TP {row['tensor_parallel_size']} x DP {row['data_parallel_size']}"
        graphs = row.get("max_cudagraph_capture_size")
        seqs = f"{row['max_num_seqs']:,}" + (f", graphs to {graphs:,}" if graphs else "")
        limits = (seqs, f"{row['max_num_batched_tokens']:,}")
        cells.append((case, row["by"], row["precision"], layout, *limits, f"{row['seconds']:,.1f}"))
    heads = ("batch", "recommended by", "precision", "layout", "sequences", "batched tokens", "simulated (s)")
    return markdown.table(heads, cells)


def simulated_again(case: Case, before: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows by today's model. before: the committed rows of the case, whose answers of AIConfigurator stay"""
    yield own_limits(case)
    for row in before:
        if row["by"].startswith("AIConfigurator"):
            seconds = simulated(case, row["precision"], **{name: row[name] for name in LIMITS})
            yield {**row, "seconds": seconds}
    yield from tuned(case)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true", help="keep AIConfigurator's answers")
    if parser.parse_args().simulate:
        committed = jsonl.rows(RESULTS)
        made = {name: committed[0][name] for name in ("date", "versions")}
        again = ((case, simulated_again(case, [x for x in committed if x["case"] == case.name])) for case in CASES)
        lines = [{"case": case.name, **made, **row} for case, rows_of in again for row in rows_of]
    else:
        lines = asked_again()
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in lines))
    print(table())


def asked_again() -> list[dict[str, Any]]:
    """The rows with new answers of AIConfigurator."""
    logging.disable(logging.WARNING)  # AIConfigurator warns of tables that these models do not use
    made = {"date": time.strftime("%Y-%m-%d"), "versions": {x: version(x) for x in ("aiconfigurator", "fp8plan")}}
    return [{"case": case.name, **row, **made} for case in CASES for row in rows(case)]


if __name__ == "__main__":
    main()
