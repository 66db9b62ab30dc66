"""The examples run as a user runs them; the engine serves the tokens of a plain loop, and its scheduler finishes whatever comes."""

import ast
import importlib.util
import os
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import tkv

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SECONDS = 240


def missing_project(path):
    """The first project that an example imports, by itself or by an integration, and that is not installed."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    projects = {name.removeprefix("tkv.integrations.").split(".")[0] for name in names} - {"distributed"}
    return next((project for project in sorted(projects) if importlib.util.find_spec(project) is None), None)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_as_it_stands(path, tmp_path):
    missing = missing_project(path)
    if missing is not None:
        pytest.skip(f"{missing} is not installed")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    if not torch.cuda.is_available():
        # An example has to find out by itself that it needs the interpreter.
        env.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, path], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(done.stdout.splitlines()) >= 3


@pytest.fixture(scope="module")
def engine():
    spec = importlib.util.spec_from_file_location("engine_example", ROOT / "examples" / "engine.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def model(engine):
    torch.manual_seed(3)
    return engine.Llama().to(engine.DEVICE)


def by_a_rule(token):
    """A next token that depends on the newest alone and runs in circles, so that drafts are right now and then."""
    return (5 * token + 3) % 11 if token % 7 else token + 1


class Scheduled:
    """An engine without kernels, whose model is `by_a_rule`; it notes what was tried, and whether the pages were enough."""

    def __init__(self, engine, num_pages, **options):
        self.engine = engine.Engine(None, num_pages, **options)
        self.pick, self.step = self.engine.pick, self.engine.manager.step
        self.engine.pick, self.engine.manager.step, self.engine.compute = self.noted_pick, self.noted_step, self.compute
        self.tries = []

    def noted_pick(self, speculate):
        work, running = self.pick(speculate), self.engine.running
        assert len(self.tries) < 1000, "does not end"
        in_line = [request.number for request in [*running, *self.engine.waiting]]
        assert in_line == sorted(in_line), "who came first is served first"
        decoding = [request for request in running if len(request.tokens) == self.engine.manager.length(request.seq) + 1]
        assert all(any(part.request is request for part in work) for request in decoding), "decoding waits for no prompt"
        self.tries.append((work, False))
        return work

    def noted_step(self, new):
        batch = self.step(new)
        self.tries[-1] = (self.tries[-1][0], True)
        return batch

    def compute(self, work, batch):
        assert batch.cu_seqlens[1:].tolist() == [sum(len(part.tokens) for part in work[: i + 1]) for i in range(len(work))]
        fed = [part.tokens[-1 - len(part.drafts) :] for part in work if part.is_last]
        return [by_a_rule(token) for tokens in fed for token in tokens]


def by_the_rule(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(by_a_rule(tokens[-1]))
    return tokens[len(prompt) :]


def scheduled(engine, seed):
    """Requests and an engine that fits the largest of them or a little more, all by chance, served."""
    dice = random.Random(seed)
    start = [dice.randrange(11) for _ in range(dice.randrange(20))]
    requests = [
        engine.Request(start + [dice.randrange(11) for _ in range(dice.randrange(1, 30))], dice.randrange(1, 25), arrival)
        for arrival in sorted(dice.randrange(20) for _ in range(dice.randrange(1, 8)))
    ]
    for number, request in enumerate(requests):
        request.number = number
    room = max(engine.pages_for(request.longest) for request in requests) + dice.choice([0, 1, 2, 5, 20])
    served = Scheduled(engine, room, chunk=dice.randrange(1, 40), speculate=dice.randrange(6))
    engine.serve(served.engine, requests)
    return requests, served


@pytest.mark.parametrize("seed", range(60))
def test_every_request_gets_its_tokens_whatever_the_room(engine, seed):
    requests, served = scheduled(engine, seed)
    assert [request.output for request in requests] == [by_the_rule(request.prompt, request.max_new) for request in requests]
    assert served.engine.manager.stats().pages_used == 0
    for work, _ in served.tries:
        undrafted = [len(part.tokens) - len(part.drafts) for part in work]
        assert sum(count for count in undrafted if count > 1) <= served.engine.chunk
        assert all(len(part.drafts) <= served.engine.speculate for part in work)


def test_drafts_are_given_up_first_and_then_the_youngest(engine):
    without_drafts = preempted = 0
    for seed in range(60):
        requests, served = scheduled(engine, seed)
        for (work, enough), (again, _) in pairwise(served.tries):
            if enough:
                continue
            if any(part.drafts for part in work):
                without_drafts += 1
                assert [part.request.seq for part in again] == [part.request.seq for part in work]
                assert not any(part.drafts for part in again)
            else:
                preempted += 1
                left = [part.request for part in again]
                assert left == [part.request for part in work][: len(left)] and len(left) >= len(work) - 1
        assert sum(request.preempted for request in requests) == sum(
            not enough and not any(part.drafts for part in work) for work, enough in served.tries
        )
    assert without_drafts > 10 and preempted > 10


def test_drafts_are_what_followed_the_newest_two_tokens_last(engine):
    assert engine.propose([1, 2, 3, 1, 2, 4, 5, 6, 1, 2], 2) == [4, 5]
    assert engine.propose([1, 2, 3, 1, 2], 9) == [3, 1, 2]
    assert engine.propose([7, 7, 7], 5) == [7]
    assert engine.propose([1, 2, 3, 2, 1], 5) == []
    assert engine.propose([1, 2, 1, 2], 0) == engine.propose([1], 3) == []


def test_tokens_are_those_of_a_plain_loop_with_speculation_in_fewer_steps(engine, model):
    with_drafts, without = engine.make_requests(3), engine.make_requests(3)
    engine.serve(engine.Engine(model, 32, speculate=3), with_drafts)
    engine.serve(engine.Engine(model, 32, speculate=0), without)
    plain = [engine.plain_output(model, request.prompt, request.max_new) for request in with_drafts]
    assert [request.output for request in with_drafts] == [request.output for request in without] == plain
    # Of what all prompts begin with, 21 tokens, none is computed twice, although the last of them are a part of a page.
    assert [request.cached for request in with_drafts] == [request.cached for request in without] == [0, 21, 21]
    accepted, drafted = (sum(getattr(request, name) for request in with_drafts) for name in ("accepted", "drafted"))
    assert 0 < accepted < drafted
    assert sum(request.steps for request in with_drafts) == sum(request.steps for request in without) - accepted


def test_sequences_that_lose_their_pages_are_computed_again(engine, model):
    generator = torch.Generator().manual_seed(7)
    requests = [engine.Request(torch.randint(engine.VOCAB, (length,), generator=generator).tolist(), 20) for length in (5, 6, 7)]
    tight = engine.Engine(model, 5, chunk=9)
    engine.serve(tight, requests)
    assert [request.output for request in requests] == [engine.plain_output(model, request.prompt, 20) for request in requests]
    assert sum(request.preempted for request in requests) > 0
    assert tight.manager.stats().evictions > 0


def test_the_example_tells_when_a_token_is_wrong(engine, monkeypatch, capsys):
    write_kv = tkv.write_kv
    monkeypatch.setattr(tkv, "write_kv", lambda k, v, cache, slots: write_kv(-k, v, cache, slots))
    assert engine.main(["--requests", "1"]) == 1
    assert "10 of 10" not in capsys.readouterr().out


def test_a_quantised_cache_is_told_about_and_not_judged(engine, capsys):
    assert engine.main(["--requests", "2", "--format", "int4/token_head", "--chunk", "40"]) == 0
    table = capsys.readouterr().out
    assert table.splitlines()[2].split()[:3] == ["0", "26", "0"]
    assert table.splitlines()[3].split()[:3] == ["1", "33", "21"]
    assert "int4/token_head cache" in table


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--format", "int8/tensor"], "needs calibrated scales"),
        (["--chunk", "0"], "--chunk are 1 or more"),
        (["--speculate", "-1"], "--speculate is 0 or more"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(engine, argv, message, capsys):
    with pytest.raises(SystemExit) as ended:
        engine.main(argv)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_request_that_can_never_be_served_is_refused_when_it_is_submitted(engine):
    small = engine.Engine(None, 3)
    small.submit(engine.Request([1] * 20, 4))
    with pytest.raises(ValueError, match="25 tokens needs 4 pages, there are 3"):
        small.submit(engine.Request([1] * 20, 5))
    for request in (engine.Request([], 4), engine.Request([1], 0)):
        with pytest.raises(ValueError, match="a token to begin with and one to generate"):
            small.submit(request)
