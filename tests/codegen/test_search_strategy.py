"""What the search tries next, and the log of what it tried."""

import itertools
import math

from tilewright.codegen.search import strategy
from tilewright.codegen.search.trials import Trial, Trials
from tilewright.schedules.spaces import Space


def points(**values):
    return Space(
        choices=values,
        default={name: options[0] for name, options in values.items()},
        legal=lambda decisions: decisions.get("a", 1) * decisions.get("d", 1) <= 128,
        module=lambda decisions: None,
        plan=lambda decisions: {},
    )


WIDE = {
    "a": (1, 2, 4, 8, 16, 32),
    "b": (1, 2, 3, 4, 5, 6, 7, 8),
    "c": (0, 1, 2),
    "d": (1, 2, 4, 8, 16),
    "e": tuple(range(10)),
}


def seconds_of(decisions):
    """A made-up time with its least, 1 ms, at a=8 b=6 c=1 d=4 e=7; c=2 fails."""
    if decisions["c"] == 2:
        return None
    distance = 0.2 * abs(math.log2(decisions["a"]) - 3) + 0.1 * abs(decisions["b"] - 6) + 0.3 * (decisions["c"] == 0)
    return 1e-3 * (1 + distance + 0.15 * abs(math.log2(decisions["d"]) - 2) + 0.05 * abs(decisions["e"] - 7))


def simulate(seed, trials, known=()):
    evolution = strategy.Evolution(points(**WIDE), seed, 16)
    evolution.tell(known)
    rows = list(known)
    while len(rows) < trials:
        new = [(decisions, seconds_of(decisions)) for decisions in evolution.ask(16)]
        evolution.tell(new)
        rows += new
    return rows


def test_the_search_nears_the_optimum_of_7200_points_in_80_trials():
    for seed in range(2):
        rows = simulate(seed, 80)
        assert min(seconds for _, seconds in rows if seconds) <= 1.11e-3  # the best 0.3 % of the space
        late = rows[48:]
        assert sum(seconds is None for _, seconds in late) <= len(late) / 4  # a third of the space fails


def test_a_seed_fixes_the_proposals():
    first = simulate(5, 48)
    assert simulate(5, 48) == first
    assert simulate(6, 16) != first[:16]


def test_nothing_is_proposed_twice_or_illegal_also_after_resuming():
    known = simulate(7, 32)
    rows = simulate(7, 64, known)
    assert rows[:32] == known
    assert len({tuple(decisions.values()) for decisions, _ in rows}) == len(rows)
    assert all(decisions["a"] * decisions["d"] <= 128 for decisions, _ in rows)


def test_a_small_space_is_tried_in_full_and_then_ends():
    small = points(a=(1, 64, 128), d=(1, 2, 3))
    evolution = strategy.Evolution(small, 0, 16)
    seen = []
    while proposed := evolution.ask(4):
        evolution.tell((decisions, 1e-3 * decisions["d"]) for decisions in proposed)
        seen += [tuple(decisions.values()) for decisions in proposed]
    assert sorted(seen) == [(a, d) for a, d in itertools.product((1, 64, 128), (1, 2, 3)) if a * d <= 128]


def test_trials_survive_a_line_cut_short(tmp_path):
    identity = {"key": "k", "code": "c"}
    trials = Trials(tmp_path, identity, resume=True)
    trials.append(Trial({"a": 1}, 5.0))
    trials.append(Trial({"a": 2}, None, "crashed", "SIGSEGV"))
    path = tmp_path / "trials.jsonl"
    path.write_text(path.read_text() + '{"decisions": {"a": 3}, "us"')
    again = Trials(tmp_path, identity, resume=True)
    assert again.done == trials.done
    again.append(Trial({"a": 4}, 4.0))
    assert Trials(tmp_path, identity, resume=True).done == again.done
    assert again.failures() == {"crashed": 1}
    assert again.curve() == [(1, 5.0), (3, 4.0)]


def test_a_fresh_start_sets_the_old_trials_aside(tmp_path):
    Trials(tmp_path, {"key": "k"}, resume=True).append(Trial({"a": 1}, 5.0))
    fresh = Trials(tmp_path, {"key": "k"}, resume=False)
    assert fresh.done == []
    assert "fresh start" in fresh.note
    assert '"a": 1' in (tmp_path / "trials.old.jsonl").read_text()
