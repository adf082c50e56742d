"""The measurements of issue 39 that were missing, untrue or not comparable, with what fp8plan says of each.

    python benchmarks/odd_measurements.py --checkout DIR --label before     run the package of another checkout
    python benchmarks/odd_measurements.py --label after                     run this one

Each run replaces the rows of its label in results/odd_measurements.jsonl. docs/evidence/odd_measurements.md shows both
labels, and beside them the examples that need an engine or a server, with the tests that show them (LIVE).
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import before_after
from before_after import FOLDER, Example, Files, lines
from tables import markdown

RESULTS = FOLDER / "odd_measurements.jsonl"
MOST_SHOWN = 460  # characters of an answer: figures, alarms and the doctor's word


def step(name: str, *arguments: Any, **more: Any) -> tuple[str, str]:
    """A command that calls a function of odd_steps."""
    words = ", ".join([*map(repr, (name, *arguments)), *(f"{key}={value!r}" for key, value in more.items())])
    return "-c", f"from math import inf, nan; import odd_steps; odd_steps.run({words})"


def server(call: str) -> tuple[str, str]:
    """A command that calls a function of odd_servers."""
    return "-c", f"import odd_servers; odd_servers.{call}"


def stdout(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout


def rows_of(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


# 1, 7: files


def faults(done: subprocess.CompletedProcess[str]) -> str:
    """The faults of a diagnosis as JSON."""
    found = json.loads(done.stdout)["findings"]
    return "; ".join(f"{x['fault']}: {x['says']}" for x in found if x["state"] == "fault") or "no fault"


def imported(done: subprocess.CompletedProcess[str]) -> str:
    """The lengths and seconds of imported rollouts, and the notes."""
    records = [json.loads(line) for line in done.stdout.splitlines()]
    shown = "; ".join(
        f"prompts {x['prompt_lengths']}, responses {x['response_lengths']}, seconds {x.get('seconds')}" for x in records
    )
    notes = [line for line in done.stderr.splitlines() if line.startswith("note:")]
    return f"{len(records)} rollouts: {shown}. {' '.join(notes)}"


def tokenizer() -> Files:
    """The files of a tokenizer for which a byte is a token, with Qwen3's chat template as TRL ships it."""
    import trl
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({byte: number for number, byte in enumerate(alphabet)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|pad|>")
    found.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    with tempfile.TemporaryDirectory() as folder:
        found.save_pretrained(folder)
        return {f"tokenizer/{x.name}": x.read_bytes() for x in Path(folder).iterdir()}


def doctored() -> Iterator[Example]:
    """Logs whose last step is broken."""
    fine = {"rollout_corr/k3_kl": 0.002, "fp8plan/kl_limit": 0.01, "fp8plan/tokens": 900.0, "fp8plan/invalid": 0.0}
    command = ("doctor", "MODEL/run.jsonl", "--json")
    for word in ("null", "1e999", "NaN"):
        log = rows_of({"step": 1, "data": fine}) + f'{{"step": 2, "data": {{"rollout_corr/k3_kl": {word}}}}}\n'
        title = f"doctor of a log whose last k3 is {word}"
        yield Example(1, title, command, {"run.jsonl": log}, faults, (0, 1))
    console = "step:1 - rollout_corr/k3_kl:0.002\nstep:2 - rollout_corr/k3_kl:nan - actor/lr:1e-06\n"
    yield Example(
        1,
        "doctor of a console whose last k3 is nan",
        ("doctor", "MODEL/log.txt", "--json"),
        {"log.txt": console},
        faults,
        (0, 1),
    )
    record = {"model": "Qwen/Qwen3-8B", "gpu": "h200_sxm", "engine_version": "0.26.0", "precision": "bf16"}
    steps = [record | {"step": n, "metrics": fine, "alarms": ["unit_mean"] if n > 2 else []} for n in range(1, 5)]
    yield Example(
        1,
        "doctor of a run file that recorded the alarm unit_mean",
        command,
        {"run.jsonl": rows_of(*steps)},
        faults,
        (0, 1),
    )


def verl_dumps(own: Files) -> Iterator[Example]:
    """Dumps of verl and logs that are torn, or hold what is no number. own: files of the tokenizer"""
    whole = rows_of({"input": "abcd", "output": "abcdefgh", "score": 1.0})
    nan = '{"input": "abcd", "output": "abcdefgh", "score": NaN}\n'
    torn = whole + '{"input": "abcd", "out'
    log = rows_of({"step": 2, "data": {"timing_s/gen": 12.5, "critic/score": float("nan")}})
    words = "import", "verl", "MODEL/dump", "--tokenizer", "MODEL/tokenizer"
    logged = (*words, "--log", "MODEL/log.jsonl")
    newest = {"dump/1.jsonl": whole, "dump/2.jsonl": torn}
    begun = {"dump/1.jsonl": whole, "dump/2.jsonl": torn.removeprefix(whole)}
    torn_log = log.replace("NaN", "1") + '{"step": 3, "da'
    last = (*words, "--last", "1")
    for title, command, files in (
        ('"score": NaN in a verl dump', words, {"dump/1.jsonl": nan}),
        ('"score": NaN in a verl dump, --last 1', last, {"dump/1.jsonl": nan}),
        ("a torn last line in the newest verl dump", words, newest),
        ("a torn last line in the newest verl dump, --last 1", last, newest),
        ("a newest verl dump that holds half a line, --last 1", last, begun),
        ("NaN in a field of the log that nobody reads", logged, {"dump/2.jsonl": whole, "log.jsonl": log}),
        ("a log whose last line is torn", logged, {"dump/2.jsonl": whole, "log.jsonl": torn_log}),
    ):
        yield Example(7, title, command, own | files, imported)
    coloured = "\x1b[36m(TaskRunner pid=7)\x1b[0m step:2 - \x1b[32mtiming_s/gen\x1b[0m:\x1b[1m12.5\x1b[0m - x:1\n"
    for title, console in {
        "--log with colours": coloured,
        "--log with thousands separators": "step:2 - timing_s/gen:1,234.5 - perf/total_num_tokens:1,048,576\n",
    }.items():
        command = (*words, "--log", "MODEL/run.log")
        yield Example(7, title, command, own | {"dump/2.jsonl": whole, "run.log": console}, imported)
    record = {
        "model": "Qwen/Qwen3-1.7B", "gpu": "h200_sxm", "engine_version": "0.26.0", "precision": "bf16",
        "prompt_lengths": [512] * 64, "response_lengths": [1024] * 64, "seconds": 2.5, "reward": float("nan"),
    }  # fmt: skip
    yield Example(
        7, "validate: NaN in a field of a record that nobody reads",
        ("validate", "MODEL/run.jsonl", "--json", "--include-first"), {"run.jsonl": rows_of(record)},
        lambda done: f"counts {len(json.loads(done.stdout)['records'])} rollout",
    )  # fmt: skip


def conversations(own: Files) -> Iterator[Example]:
    """Completions that TRL logged as messages. own: files of the tokenizer"""
    import pandas as pd

    call = {"type": "function", "function": {"name": "multiply", "arguments": {"a": 1234567, "b": 7654321}}}
    tools = [{"type": "function", "function": {"name": "multiply", "description": "Multiply.", "parameters": {}}}]
    said = {"role": "assistant", "content": "It is 9."}
    reasoned = {"role": "assistant", "content": "", "reasoning_content": "because " * 60, "tool_calls": [call]}
    output = {"role": "tool", "name": "multiply", "content": "9" * 300}
    words = "import", "trl", "MODEL/run", "--tokenizer", "MODEL/tokenizer"

    def logged(*completion: dict[str, Any]) -> Files:
        table = {"step": 1, "prompt": [[{"role": "user", "content": "How much?"}]], "completion": [list(completion)]}
        pd.DataFrame(table | {"advantage": 0.0}).to_parquet(file := BytesIO())
        return own | {"run/completions_00001.parquet": file.getvalue(), "tools.json": json.dumps(tools)}

    for title, command, files in (
        ("TRL: a completion of reasoning and a call of a tool (about 590 tokens)", words, logged(reasoned)),
        ("TRL: an answer of 28 tokens after 300 of a tool's output", words, logged(output, said)),
        ("TRL: the definitions of tools", (*words, "--tools", "MODEL/tools.json"), logged(said)),
    ):
        yield Example(7, title, command, files, imported)


def examples() -> Iterator[Example]:
    """The examples of issue 39 that need no engine, point by point."""
    own = tokenizer()
    for title, command in {
        "all rollout log-probs NaN, six steps": step("invalid", 2.0),
        "53% of the rollout log-probs NaN": step("invalid", 0.53),
        "all trainer log-probs -inf": step("invalid", 2.0, "train", float("-inf")),
        "0.2% of the rollout log-probs NaN": step("invalid", 0.002),
        "all NaN inside the hooks of slime, prime-rl and SkyRL": step("hooks"),
        "the guides' loss with one NaN trainer log-prob": step("recipe"),
    }.items():
        yield Example(1, title, command, show=stdout)
    yield from doctored()
    for title, command in {
        "sequence MIS, 8,192 tokens, k3 3e-3": step("sequence_level", "mis", 3e-3, 8192),
        "sequence TIS, one synthetic EOS (0.0 against -4.4)": step("sequence_level", "tis", 1e-9, 200, eos=True),
        "sequence TIS, a bias of 0.03 a token, 2,000 tokens": step("sequence_level", "tis", 1e-3, 2000, 0.03),
        "the remedy that the warning of sequence MIS names": step("sequence_level", "mis", 3e-3, 8192, remedies=True),
    }.items():
        warned = lines("^warns: alarm lost") if "remedy" in title else stdout
        yield Example(2, title, command, show=warned)
    for title, command in {
        "identical weights, top_p 0.8, which nobody tells the Monitor": step("nucleus", False),
        "the same, and the loop says top_p 0.8": step("nucleus", True),
        "top_k, min_p, temperature, penalties, logit bias": step("samplings"),
        "negative log-likelihoods on both sides": step("units", "nll"),
        "probabilities on both sides": step("units", "probabilities"),
        "log10 on both sides": step("units", "log10"),
        "one negated row of eight": step("negated_row"),
        "the same tensor on both sides": step("same_tensor"),
        "a float mask of 0.5 for the second half": step("mask_of", "a half"),
        "labels with -100 as the mask": step("mask_of", "labels"),
        "token ids as the mask": step("mask_of", "token ids"),
        "the parts of a KL: staleness and precision": step("mixture", 4e-3, 2e-3),
        "the parts of a KL: sampling and precision": step("mixture", 0, 2e-3, 0.8),
        "the parts of a KL: all three": step("mixture", 4e-3, 2e-3, 0.8),
        "doctor: sparse_nccl updates of FP8 weights": server("looked('sparse_nccl updates of FP8 weights')"),
        "doctor: experts in FP8 without router replay": server(
            "looked('experts in FP8 whose routes are not returned')"
        ),
    }.items():
        yield Example(3, title, command, show=stdout)
    for title, command in {
        "limit_kl 0, and a step of KL 0.1": step("limit_kl", 0),
        "limit_kl -1": step("limit_kl", -1),
        "limit_kl NaN": step("limit_kl", float("nan")),
        "limit_kl '0.03'": step("limit_kl", "0.03"),
        "AlarmLimits(tail_bound=0)": step("tail_bound"),
        "limits=None": step("limits"),
        "a saved state of -5 steps": step("state_steps"),
        "a saved state of KL -1": step("state_kl"),
        "a state file that is not UTF-8": step("state_file"),
    }.items():
        yield Example(4, title, command, show=stdout)
    yield Example(5, "rank 1 of two rejects its batch 0 and continues", step("ranks"), show=stdout)
    yield from verl_dumps(own)
    yield from conversations(own)
    for title, command in {
        "two writers in one run file": step("two_writers"),
        "a new run in an old run file": step("old_file"),
        "a disk that is full for 300 steps": step("full_disk"),
    }.items():
        yield Example(7, title, command, show=stdout)
    for name in (
        *("chunks that break off", "a body that is shorter than its length", "no HTTP (an SSH server)"),
        *("JSON 100,000 lists deep", "/server_info is a list", "/server_info: vllm_config is text"),
        *("/metrics counts NaN preemptions", "/v1/completions answers a number", "a byte each second"),
    ):
        yield Example(8, f"doctor URL: {name}", server(f"looked({name!r})"), show=stdout)
    yield Example(8, "doctor URL: a server that asks for an API key", server("with_key()"), show=stdout)
    yield Example(9, "RolloutEngine.from_setup(..., max_num_seq=8)", step("misspelt"), show=stdout)
    yield Example(9, "speculative_config", step("not_modelled", "speculative_config"), show=stdout)
    yield Example(9, "enable_lora", step("not_modelled", "enable_lora"), show=stdout)


class Live(NamedTuple):
    """An example that needs a live engine or server.

    before: as issue 39 found it; now: as the tests show it
    tests:  file in tests/ -> names of the tests
    """

    point: int
    example: str
    before: str
    now: str
    tests: Mapping[str, tuple[str, ...]]


BIASED = ("test_a_biased_sampling_goes_on_where_it_is_allowed_or_nothing_is_weighted",)
LIVE = (
    Live(
        3, "a real engine's rollout with top_p, and a trainer of the same weights", "the generic alarm alone",
        "its sampling is known and named; scores on the kept set are the engine's",
        {
            "runtime/engine/test_engine_sampling.py": (
                "test_a_rollout_is_observed_with_its_sampling_and_one_that_names_none_with_the_models_own",
                "test_scores_on_the_kept_set_are_the_engines_log_probs_and_full_ones_are_named",
            )
        },
    ),
    Live(
        3, "a biased sampling in TRL's and verl's trainers, and on a server", "not known",
        "the trainers refuse it at the start; the server's status has it",
        {
            "integrations/test_trl_settings.py": BIASED,
            "integrations/test_verl_settings.py": BIASED,
            "runtime/server/test_lifecycle.py": ("test_it_says_how_requests_to_these_weights_were_sampled",),
        },
    ),
    Live(
        3, "the KL of a real engine's rollout", "one figure", "split by cause",
        {
            "runtime/engine/test_engine_attribution.py": (
                "test_parts_of_a_real_rollout_are_those_that_separate_sums_say",
            )
        },
    ),
    Live(
        6, "(a) /init_weight_transfer_engine with a store of an attacker's own", "code ran as the server's user",
        "401 without the key; with it nothing that comes is run, and the server serves on",
        {
            "runtime/server/test_wire.py": (
                "test_code_from_the_wire_is_refused_and_logged_and_the_server_serves_on",
            ),
            "runtime/server/test_gate.py": ("test_every_route_that_does_more_than_read_asks_for_the_key",),
            "runtime/weight_sync/test_plain_group.py": ("test_nothing_that_a_peer_sends_is_run",),
        },
    ),
    Live(
        6, "(b) /resume inside an open update", "the engine dies", "400, and the update goes on",
        {"runtime/server/test_wire.py": ("test_an_open_update_forbids_what_would_run_a_half_written_model",)},
    ),
    Live(
        6, "(c) seed 2^70", "a ghost request blocks every later update", "400, and nothing is left behind",
        {"runtime/server/test_wire.py": ("test_what_cannot_be_sent_to_the_engine_leaves_nothing_behind",)},
    ),
    Live(
        6, "(c) a token id equal to the vocabulary's size", "the engine ends", "400 that names prompt, place and range",
        {"runtime/server/test_wire.py": ("test_a_token_that_the_model_has_not_is_named_on_every_route",)},
    ),
    Live(
        6, "(d) names that are announced without data", "the server hangs until the trainer dies, its status, too",
        "the status answers, a deadline ends the wait, and no mixture is served",
        {
            "runtime/server/test_wire.py": (
                "test_a_trainer_that_announces_and_sends_nothing_is_let_go",
                "test_a_trainer_that_stops_midway_leaves_no_mixture_to_be_served",
            )
        },
    ),
    Live(
        6, "(e) vLLM 0.32 calls `destroy()` on the communicator", "the CPU's has none", "it has",
        {"runtime/weight_sync/test_plain_group.py": ("test_the_communicator_of_a_cpu_is_destroyed_as_nccls_is",)},
    ),
    Live(
        9, "LoRA in an engine", "no remark", "said at the start; the guard is off with that reason",
        {"runtime/engine/test_options.py": ("test_an_engine_with_lora_runs_and_is_not_judged",)},
    ),
    Live(
        9, "a sync of matrices of zeros", "a wrong reason under FP8 KV, accepted in BF16",
        "refused for that reason in every precision",
        {
            "runtime/weight_sync/test_sync_zeros.py": (
                "test_all_of_them_are_refused_for_the_same_reason_in_every_precision",
            )
        },
    ),
    Live(
        9, "a token id that the model has not", "not named", "named by prompt, place and range; the engine serves on",
        {"runtime/test_tokens.py": ("test_an_engine_serves_on_after_ids_that_it_has_not",)},
    ),
    Live(
        9, 'plan="auto" in a trainer, and the reward in its run file', "the choice is not printed; no reward",
        "the choice and its reason are printed; the run file has the reward",
        {
            "integrations/test_trl_settings.py": ("test_what_a_plan_chose_is_printed_with_its_reason",),
            "integrations/test_trl.py": ("test_trls_log_has_fp8plans_figures",),
        },
    ),
    Live(
        9, "a TRL example that runs", "none", "`examples/trl_grpo.py`",
        {"test_readme.py": ("test_the_example_of_trl_learns_and_its_run_can_be_read",)},
    ),
)  # fmt: skip


def table() -> str:
    """The committed answers, before and after, as Markdown."""
    return before_after.table(RESULTS, MOST_SHOWN)


def live_table() -> str:
    """LIVE as Markdown."""
    cells = [
        (
            str(x.point), x.example, x.before, x.now,
            "<br>".join(f"`tests/{file}`: {', '.join(names)}" for file, names in x.tests.items()),
        )
        for x in LIVE
    ]  # fmt: skip
    return markdown.table(("point", "example", "before", "now", "tests"), cells)


if __name__ == "__main__":
    before_after.main(__doc__, examples(), RESULTS)
