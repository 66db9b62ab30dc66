"""The demo of eviction, on a tiny random Llama: what each policy's queries see, key by key, tables, goals and exit statuses."""

import re

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the demo's packages are not installed: pip install 'tkv[demo]'")

from tkv.demo import DemoError, decode, eviction, model  # noqa: E402
from tkv.demo.attention import Step, attention_by_tkv, empty_caches  # noqa: E402
from tkv.demo.evicting import EvictingModel  # noqa: E402
from tkv.demo.eviction import Measured, goals_of, policies_of  # noqa: E402
from tkv.demo.eviction_plot import STYLES, Line, draw_lines  # noqa: E402

SIZES = dict(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
BUDGET, CHUNK, TOKENS, TEXTS = 24, 8, 48, 2


@pytest.fixture
def llama(device):
    return model.random_llama(**SIZES).requires_grad_(False).to(device)


@pytest.fixture
def ids(device):
    return torch.randint(256, (TEXTS, TOKENS), generator=torch.Generator().manual_seed(1)).to(device)


def read(llama, ids, chosen, budget=BUDGET, chunk=CHUNK):
    """The hidden states of a batch of all policies, `budget` tokens at first and then by chunks."""
    evicting = EvictingModel(llama, chosen, len(ids), budget)
    ids = ids.repeat(len(chosen), 1)
    ends = [*range(budget, ids.shape[1] + 1, chunk)]
    hidden = [
        evicting.read(ids[:, first:end], None if end == ends[-1] else budget - chunk) for first, end in zip((0, *ends), ends)
    ]  # fmt: skip
    return torch.cat(hidden, 1), evicting


def best(scores, keys, count):
    """The keys of the highest scores, the first of equals."""
    return sorted(sorted(keys, key=lambda key: (-scores[key], key))[:count])


def chosen_by(name, held, mass, newest_mass, count):
    """What a policy keeps of the keys that a head holds, by a loop."""
    if name in ("window", "sinks + window"):
        sinks = 4 if name.startswith("sinks") else 0
        return held[:sinks] + held[len(held) - (count - sinks) :]
    if name == "H2O":
        return best(mass, held[: len(held) - count // 2], count - count // 2) + held[len(held) - count // 2 :]
    assert name == "SnapKV"
    window = min(eviction.OBSERVED, count)
    before = held[: len(held) - window]
    pooled = {
        key: sum(newest_mass[before[j]] for j in range(max(0, i - 2), min(len(before), i + 3))) / 5 for i, key in enumerate(before)
    }  # fmt: skip
    return best(pooled, before, count - window) + held[len(held) - window :]


def by_loops(llama, ids, name, count):
    """Hidden states of one text, with a list of keys for every head that is cut after each chunk."""

    def attend(cache, q, k, v, scale):
        out = torch.zeros_like(q)
        for head in range(k.shape[2]):
            held, mass, first = [], dict.fromkeys(range(TOKENS), 0.0), 0
            for end in range(BUDGET, TOKENS + 1, CHUNK):
                newest_mass = dict.fromkeys(range(TOKENS), 0.0)
                for token in range(first, end):
                    held.append(token)
                    for q_head in (2 * head, 2 * head + 1):
                        p = (k[0, held, head] @ q[0, token, q_head] * scale).softmax(0)
                        out[0, token, q_head] = p @ v[0, held, head]
                        for key, part in zip(held, p.tolist()):
                            mass[key] += part
                            newest_mass[key] += part * (token >= end - eviction.OBSERVED)
                first = end
                if end < TOKENS:
                    held = chosen_by(name, held, mass, newest_mass, count)
        return out

    positions = torch.arange(TOKENS, device=ids.device)[None]
    slots = torch.full((TOKENS,), -1, device=ids.device)
    step = Step(empty_caches(llama, "fp32", 1, 16), slots, positions, attend, None)
    with torch.no_grad(), attention_by_tkv(llama):
        return llama.model(input_ids=ids[None], position_ids=positions, use_cache=False, paged=step).last_hidden_state[0]


def test_a_budget_for_the_whole_text_gives_the_models_own_logits(llama, ids):
    chosen = policies_of(TOKENS)
    hidden, evicting = read(llama, ids, chosen, budget=TOKENS)
    own = torch.stack([decode.own_logits(llama, tuple(row.tolist())) for row in ids])
    torch.testing.assert_close(llama.lm_head(hidden), own.repeat(len(chosen), 1, 1), atol=1e-4, rtol=0)
    assert 0 < evicting.difference < 1e-5 and evicting.most_pages == 3


def test_queries_see_what_each_policy_has_kept(llama, ids, monkeypatch):
    monkeypatch.setattr(eviction, "OBSERVED", 5)
    chosen = policies_of(BUDGET - CHUNK)
    hidden, evicting = read(llama, ids, chosen)
    by_policy = dict(zip([policy.name for policy in chosen], hidden.split(TEXTS)))
    assert evicting.most_pages == 2 and evicting.difference < 1e-5
    assert evicting.manager.stats().pages_used == 2 * len(evicting.seqs)
    expected = {name: by_loops(llama, ids[1], name, BUDGET - CHUNK) for name in by_policy if name != "random"}
    for name, states in expected.items():
        torch.testing.assert_close(by_policy[name][1], states, atol=1e-4, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
    late = slice(BUDGET + CHUNK, None)
    names = list(by_policy)
    assert all((by_policy[a][1, late] - by_policy[b][1, late]).abs().max() > 1e-2 for a in names for b in names if a < b)


LOSSES = torch.tensor([[1.0, 2.0, 3.0], [2.0, 5.0, 2.0]], dtype=torch.float64)


def test_goals_are_over_both_texts():
    times = {"window": 1.6, "random": 1.4, "sinks + window": 1.1, "H2O": 1.2}
    losses = {name: LOSSES + torch.tensor(ratio).double().log() for name, ratio in times.items()}
    goals = goals_of([Measured(128, {}, 0.0, 1, ""), Measured(256, losses, 0.0, 1, "")], LOSSES)
    assert [goal.reached for goal in goals] == [True, False, True, False]
    assert goals[0].seen == "1.60 (1.60, 1.60)"


@pytest.fixture
def small_scenario(monkeypatch, tmp_path):
    """The scenario on a tiny model and short texts, in an empty folder."""
    monkeypatch.setattr(eviction, "find_gguf", lambda: (None, "there is none"))
    monkeypatch.setattr(eviction, "load_model", lambda path, dtype, device: model.random_llama(**SIZES).to(device, dtype))
    for name, value in dict(TOKENS=64, MEASURED_TOKENS=20, BUDGETS={32: 16, 24: 20}).items():
        monkeypatch.setattr(eviction, name, value)
    monkeypatch.chdir(tmp_path)
    eviction._model.cache_clear()
    yield tmp_path
    eviction._model.cache_clear()


def test_scenario_with_a_random_model(small_scenario, capsys):
    pytest.importorskip("matplotlib")
    assert eviction.run("fp32", workers=1) == 0
    out, err = capsys.readouterr()
    assert "NO PRETRAINED MODEL: there is none" in out and "Goals" not in out
    rows = re.findall(r"^ +(\d+)  (\S.*?) +([\d.]+) +([\d.]+) +([\d.]+) +(\d\.\d+) +(\d\.\d+)$", out, re.M)
    names = {policy.name for policy in policies_of(8)}
    assert [row[0] for row in rows] == ["24"] * 5 + ["32"] * 5 and {row[1] for row in rows[:5]} == {row[1] for row in rows[5:]} == names
    for _, _, first, second, both, ratio, _ in rows:
        assert float(first) * float(second) == pytest.approx(float(both) ** 2, rel=1e-3) and 0.3 < float(ratio) < 3
    full = re.search(r"^ +all keys +([\d.]+) +([\d.]+) +([\d.]+)$", out, re.M)
    llama = model.random_llama(**SIZES)
    ids = eviction.read_texts(model.load_tokenizer(None))[0]
    expected = torch.nn.functional.cross_entropy(decode.own_logits(llama, ids)[43:63], torch.tensor(ids[44:])).exp()
    assert float(full[1]) == pytest.approx(float(expected), abs=0.011)
    assert float(rows[0][5]) == pytest.approx(float(rows[0][4]) / float(full[3]), abs=2e-3)
    assert out.count("tkv's KERNEL, paged_decode") == 2
    assert f"As a picture: {small_scenario / 'tkv-eviction.png'}" in out
    assert (small_scenario / "tkv-eviction.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert "budget 32, text 2: tokens 1 to 32 of 5 sequences" in err


def test_attention_that_differs_fails_the_scenario(small_scenario, capsys, monkeypatch):
    from tkv.demo import evicting

    paged_decode = evicting.paged_decode
    monkeypatch.setattr(evicting, "paged_decode", lambda *args, **options: paged_decode(*args, **options) * 1.01)
    monkeypatch.setattr(eviction, "BUDGETS", {56: 8})
    assert eviction.run("fp32", workers=1, out=small_scenario / "other.png") == 1
    assert "by more than rounding explains" in capsys.readouterr().out


def test_paths_of_pictures_are_refused_before_the_work(small_scenario, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(eviction, "find_gguf", lambda: pytest.fail("the work has begun"))
    with pytest.raises(DemoError, match="name another file with --out"):
        eviction.run("fp32", out=small_scenario / "none" / "plot.png")


def test_the_picture_has_a_colour_for_each_policy(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    lines = [Line(name, ((128, 2.0 + i), (256, 1.1 + 0.2 * i))) for i, name in enumerate("abcde")]
    path = tmp_path / "picture.png"
    draw_lines(lines, "a title", "of what", path)
    image = torch.from_numpy(imread(path)[..., :3])
    for colour, _ in STYLES:
        assert ((image - torch.tensor(to_rgb(colour))).abs().amax(-1) < 0.01).sum() > 200
    with pytest.raises(DemoError, match="cannot be written"):
        draw_lines(lines, "a title", "of what", tmp_path / "none" / "picture.png")
