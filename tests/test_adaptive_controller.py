"""What the controller of adaptive speculation must reach, in simulations without a clock."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from unittest.mock import patch

import numpy as np
import pytest
from adaptive_simulator import MACHINES, Fixed, Fleet, Machine, Policy, Text, compare, controller_of, expected_rate, gain_of_fixed
from adaptive_traffic import against_off

from titan.adaptive.controller import NUM_PLAIN, PLAIN_GAIN, PLAIN_STEPS, Controller
from titan.adaptive.costs import COLD_PLAIN_STEPS, Costs
from titan.adaptive.host_time import FIRST_STEPS
from titan.adaptive.lessons import IDLE_FADE
from titan.adaptive.load import Candidate, Load, Outcome
from titan.adaptive.optimum import DEBT_STEPS, Prices, best
from titan.adaptive.pass_cost import PassCost
from titan.adaptive.probes import LEAST_REVIEWED, PROBE_SHARE, Probes
from titan.adaptive.rest import Rest
from titan.adaptive.standing import DWELL, Standing
from titan.adaptive.value import PastRequests, Yield, estimate
from titan.core.draft_history import AcceptanceCounts

DEMO, BIG, BIG16, STEP, GPU, WARM = MACHINES.values()
NEVER, ALWAYS = Fixed, partial(Fixed, 6)


def adaptive(machine: Machine) -> Callable[[], Policy]:
    return partial(controller_of, machine)


def mixed(n: int, good: float = 0.9, bad: float = 0.02) -> list[Text]:
    return [Text(good if i % 2 else bad) for i in range(n)]


@pytest.mark.parametrize(
    ("machine", "n", "acceptance"),
    [
        *((machine, n, 0.2) for machine in (DEMO, BIG, BIG16, STEP, GPU) for n in (1, 8)),
        *((DEMO, n, a) for n, a in ((1, 0.5), (8, 0.8), (8, 0.5), (32, 0.95), (32, 0.35))),
        *((BIG, n, a) for n, a in ((1, 0.65), (8, 0.95), (32, 0.5))),
        *((BIG16, n, a) for n, a in ((1, 0.95), (8, 0.65))),
        *((STEP, n, a) for n, a in ((1, 0.8), (1, 0.95), (2, 0.65), (32, 0.9))),
        *((GPU, n, a) for n, a in ((1, 0.8), (8, 0.5), (32, 0.65))),
        *((WARM, n, a) for n, a in ((1, 0.8), (2, 0.65), (32, 0.5))),
    ],
    ids=lambda each: getattr(each, "name", str(each)),
)
def test_cell_of_the_grid(machine: Machine, n: int, acceptance: float) -> None:
    texts = [Text(acceptance)] * n
    rate = compare(machine, texts, adaptive(machine), seeds=9 if n == 1 else 3)
    assert rate >= 0.97
    assert rate >= 0.95 * max(gain_of_fixed(machine, texts, length) for length in (1, 2, 4, 6))


def test_caches_that_stay_warm_without_drafts() -> None:
    """Steps without drafts then take less than right after some with drafts, and less than was measured at the start."""
    for n, acceptance in ((8, 0.65), (2, 0.5), (1, 0.5)):
        assert compare(WARM, [Text(acceptance)] * n, adaptive(WARM), 400, 9) >= 0.94


def test_passes_that_were_measured_too_slow() -> None:
    """As where other work was going on at the start: that steps without drafts take less is not taken for warm caches alone."""

    def controller() -> Controller:
        target, draft = (
            BIG16.curve(lambda rows, context, cost=cost: 1.3 * cost(rows, context)) for cost in (BIG16.target, BIG16.draft)
        )
        return Controller(Costs(target, draft))

    texts = [Text(0.5)] * 8
    assert compare(BIG16, texts, controller, 600, 5) >= 1.03


@pytest.mark.long_where("150M", "demo AVX2")
@pytest.mark.parametrize("machine", MACHINES.values(), ids=str)
def test_fixed_numbers_bring_what_is_expected_of_them(machine: Machine) -> None:
    for texts, num_nodes in (([Text(0.8)] * 8, [6]), ([Text(0.35)] * 8, [2]), (mixed(8), [0, 4] * 4), ([Text(0.95)] * 32, [0])):
        simulated = compare(machine, texts, partial(Fixed, *num_nodes), seeds=3)
        assert simulated == pytest.approx(gain_of_fixed(machine, texts, *num_nodes), rel=0.015)


def test_simulator_can_tell() -> None:
    assert compare(BIG, [Text(0.2)] * 8, ALWAYS) < 0.5
    assert compare(DEMO, [Text(0.9)] * 2, partial(NEVER, 0)) < 1.01 < 1.5 < compare(DEMO, [Text(0.9)] * 2, ALWAYS)
    assert (
        adapts_after(DEMO, 8, 0.2, 0.9, lambda _: Fixed(0), seeds=3)
        == adapts_after(DEMO, 8, 0.9, 0.2, lambda _: Fixed(6), seeds=3)
        == 300
    )
    with pytest.raises(AssertionError):
        assert compare(DEMO, mixed(8), partial(Fixed, 3)) >= 1.05


@pytest.mark.parametrize(
    ("machine", "n"),
    [*product((DEMO, BIG16), (1, 8)), (BIG, 1), (GPU, 8), (BIG, 32)],
    ids=lambda each: getattr(each, "name", str(each)),
)
def test_first_steps_with_a_hopeless_draft(machine: Machine, n: int) -> None:
    for acceptance in (0.02, 0.2):
        assert compare(machine, [Text(acceptance)] * n, adaptive(machine), 100, 11) >= 0.97


@pytest.mark.long_where("demo float32-2")
@pytest.mark.parametrize(
    ("machine", "n", "uniform", "oracle"),  # of the best uniform setting; of fixed numbers for the good ones alone
    [(DEMO, 2, 1.05, 0.95), (DEMO, 8, 1.05, 0.92), (BIG16, 2, 1.05, 0.95), (GPU, 8, 0.95, 0.95), (BIG, 8, 0.95, 0.9)],
    ids=lambda each: getattr(each, "name", str(each)),
)
def test_mixed_fleet(machine: Machine, n: int, uniform: float, oracle: float) -> None:
    texts = mixed(n)
    rate = compare(machine, texts, adaptive(machine), seeds=max(15, 120 // n))  # with few requests, runs differ more
    lengths = (1, 2, 3, 4, 6)
    assert rate >= uniform * max(1.0, *(gain_of_fixed(machine, texts, each) for each in lengths))
    assert rate >= oracle * max(1.0, *(gain_of_fixed(machine, texts, *([0, each] * n)) for each in lengths))


def adapts_after(
    machine: Machine,
    n: int,
    before: float,
    after: float,
    make: Callable[[Machine], Policy] = controller_of,
    honesty: float = 1.0,
    early: bool | None = None,
    seeds: int = 9,
) -> float:
    """Steps until half of the way is made to the nodes per step that are drafted when nothing changes, in the mean of eight."""
    stops_early = not machine.is_padded if early is None else early

    def fleet(acceptance: float, seed: int) -> Fleet:
        return Fleet(machine, [Text(acceptance, honesty=honesty) for _ in range(n)], seed=seed, stops_early=stops_early)

    wanted = [np.mean(fleet(acceptance, 9).run(make(machine), 200).nodes[-100:]) for acceptance in (before, after)]
    steps = []
    for seed in range(seeds):
        changing, policy = fleet(before, seed), make(machine)
        changing.run(policy, 120 + 6 * seed)  # so that probes are not in step
        for text in changing.texts:
            text.acceptance = after
        nodes = np.convolve(changing.run(policy, 160).nodes, np.ones(8) / 8, "valid")
        met = nodes > np.mean(wanted) if after > before else nodes < np.mean(wanted)
        steps.append(int(met.argmax()) + 4 if met.any() and wanted[0] != wanted[1] else 300)
    return float(np.median(steps))


@pytest.mark.long_where("demo float32-32")
@pytest.mark.parametrize(
    ("machine", "n", "bound"),
    [(BIG, 1, 150), (DEMO, 1, 150), (DEMO, 8, 50), (BIG, 8, 50), (BIG16, 8, 50), (GPU, 8, 50), (DEMO, 32, 50)],
    ids=lambda each: getattr(each, "name", str(each)),
)
def test_rise_is_found_while_nothing_drafts(machine: Machine, n: int, bound: int) -> None:
    assert adapts_after(machine, n, 0.2, 0.9, seeds=25) <= bound


@pytest.mark.long_where(
    "150M bfloat16-8-confident", "150M bfloat16-8-no", "GPU, 8 B and 1 B-8-confident", "GPU, 8 B and 1 B-8-always"
)
@pytest.mark.parametrize(
    ("honesty", "early"), [(1.0, True), (0.0, True), (1.0, False)], ids=["confident", "always sure", "no confidence"]
)
@pytest.mark.parametrize(("machine", "n"), [(DEMO, 1), (BIG16, 8), (GPU, 8)], ids=lambda each: getattr(each, "name", str(each)))
def test_fall_ends_drafting(machine: Machine, n: int, honesty: float, early: bool) -> None:
    assert adapts_after(machine, n, 0.9, 0.2, honesty=honesty, early=early) <= 15


@pytest.mark.parametrize(
    ("machine", "n", "text"),
    [
        (DEMO, 1, Text(0.3, honesty=0.5, stretch=20)),
        (DEMO, 8, Text(0.6, honesty=2.0, stretch=20)),
        (BIG, 1, Text(0.3, honesty=2.0, stretch=20)),
        (BIG16, 8, Text(0.6, honesty=0.5, stretch=20)),
        (GPU, 8, Text(0.3, stretch=20)),
    ],
    ids=str,
)
def test_bursts_and_drafts_that_misjudge_themselves(machine: Machine, n: int, text: Text) -> None:
    assert compare(machine, [text] * n, adaptive(machine), seeds=5) >= 0.97


@pytest.mark.parametrize(
    ("machine", "n", "acceptance"),
    [(DEMO, 1, 0.9), (BIG, 8, 0.9), (GPU, 8, 0.5)],
    ids=lambda each: getattr(each, "name", str(each)),
)
def test_larger_caps_cost_nothing(machine: Machine, n: int, acceptance: float) -> None:
    texts = [Text(acceptance)] * n
    least = compare(machine, texts, adaptive(machine), 200, 5)
    assert min(compare(machine, texts, adaptive(machine), 200, 5, max_nodes=cap) for cap in (16, 63)) >= 0.98 * least


def test_prefill_in_the_step_and_requests_that_come_and_go() -> None:
    assert compare(BIG, [Text(0.2)] * 8, adaptive(BIG), chunk=64) >= 0.97
    assert compare(BIG, [Text(0.9)] * 8, adaptive(BIG), chunk=64) >= 1.5  # rows of the draft are few beside these
    rates = []
    for policy in (controller_of(DEMO), Fixed(0)):
        rng, fleet = np.random.default_rng(0), Fleet(DEMO, [Text(0.2) for _ in range(6)])
        runs = []
        for _ in range(60):
            fleet.texts[: int(rng.integers(3))] = [Text(0.2) for _ in range(int(rng.integers(1, 3)))]
            runs.append(fleet.run(policy, 5))
        rates.append(sum(run.num_tokens for run in runs) / sum(run.seconds for run in runs))
    assert rates[0] >= 0.97 * rates[1]


@pytest.mark.parametrize(
    ("n", "share", "acceptance", "latency"),  # of requests at once; of arrivals, 0: all wait from the beginning
    [(1, 0.0, 0.03, 1.06), (8, 0.6, 0.03, 1.1), (8, 0.6, 0.5, 1.1), (8, 0.6, 0.9, 0.8), (32, 0.9, 0.5, 1.15)],
)
def test_requests_come_and_go_while_decisions_take_time(n: int, share: float, acceptance: float, latency: float) -> None:
    """A decision takes up to half of a step without drafts, as measured with the demo pair."""
    machine = replace(DEMO, deciding=6e-5, comparing=(4e-4, 0.0))
    found = against_off(machine, lambda _: acceptance, adaptive(machine), n, share, num_requests=40 if n == 1 else 80)
    assert found.rate >= 0.97
    assert found.latency <= latency


@pytest.mark.parametrize(
    ("machine", "n", "slows_draft"),
    [(DEMO, 8, True), (DEMO, 8, False), (BIG16, 1, True), (BIG16, 8, False)],
    ids=lambda each: getattr(each, "name", str(each)),
)
def test_machine_that_was_slow_leaves_no_wrong_choice(machine: Machine, n: int, slows_draft: bool) -> None:
    draft = (lambda rows, context: 2 * machine.draft(rows, context)) if slows_draft else machine.draft
    slow = replace(machine, target=lambda rows, context: 2 * machine.target(rows, context), draft=draft)
    rates = list[float]()
    for seed in range(5):
        fleet, policy = Fleet(machine, [Text(0.8) for _ in range(n)], seed=seed), controller_of(machine)
        for each, num_steps in ((machine, 100), (slow, 100), (machine, 30)):
            fleet.machine = each
            fleet.run(policy, num_steps)
        rates.append(fleet.run(policy, 200).rate)
    fixed = max(expected_rate(machine, [Text(0.8)] * n, length) for length in (0, 1, 2, 4, 6))
    assert np.mean(rates) >= 0.95 * fixed and min(rates) >= 0.9 * fixed


@pytest.mark.parametrize(("machine", "num_steps"), [(DEMO, 2400), (BIG16, 1500)], ids=str)
def test_what_slowed_long_passes_alone_is_forgotten(machine: Machine, num_steps: int) -> None:
    """Where nothing is drafted, there are none that would show that it is over."""
    slow = replace(machine, target=lambda rows, context: machine.target(rows, context) * (3 if rows > 8 else 1))
    for seed in range(2):
        fleet, policy, shares = Fleet(machine, [Text(0.8) for _ in range(8)], seed=seed), controller_of(machine), list[float]()
        for each, count in ((machine, 200), (slow, 300), (slow, 100), (machine, num_steps), (machine, 100)):
            fleet.machine = each
            shares.append(float(np.mean(np.array(fleet.run(policy, count).nodes) > 0)))
        assert shares[2] < 0.1 < 0.8 < shares[4]


@pytest.mark.long_where("150M")
@pytest.mark.parametrize("machine", [DEMO, BIG16], ids=str)
def test_long_passes_that_get_slow_end_drafting_soon(machine: Machine) -> None:
    """Steps without drafts, which are as fast as ever, are looked at before their time."""
    slow = replace(machine, target=lambda rows, context: machine.target(rows, context) * (3 if rows > 8 else 1))
    shares = list[float]()
    for seed in range(9):
        fleet, policy = Fleet(machine, [Text(0.8) for _ in range(8)], seed=seed), controller_of(machine)
        fleet.run(policy, 200)
        fleet.machine = slow
        shares.append(float(np.mean(np.array(fleet.run(policy, 300).nodes) > 0)))
    assert np.median(shares) < 0.35


class Unmeasured(Controller):
    """Of a device, which does not say how long a review takes."""

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome._replace(review_seconds=0.0))


@pytest.mark.parametrize(
    ("machine", "slow", "kind", "num_steps"),
    [
        (DEMO, replace(DEMO, host=lambda n, drafting: DEMO.host(n, drafting) + 0.02 * (drafting > 0)), Controller, 16_000),
        (GPU, replace(GPU, draft=lambda rows, context: 8 * GPU.draft(rows, context)), Unmeasured, 1500),
    ],
    ids=["host", "draft"],
)
def test_what_slowed_drafting_alone_is_forgotten(machine: Machine, slow: Machine, kind: type[Controller], num_steps: int) -> None:
    """Such as a logits processor of a user who is gone."""
    fleet, shares = Fleet(machine, [Text(0.8) for _ in range(4)], stops_early=not machine.is_padded), list[float]()
    policy = kind(controller_of(machine).costs)
    for each, count in ((machine, 200), (slow, 300), (machine, num_steps), (machine, 100)):
        fleet.machine = each
        shares.append(float(np.mean(np.array(fleet.run(policy, count).nodes) > 0)))
    assert shares[1] < 0.4 < 0.8 < shares[3]


@pytest.mark.parametrize(("acceptance", "least"), [(0.2, 0.965), (0.9, 1.4)])
def test_profile_with_noise(acceptance: float, least: float) -> None:
    rng = np.random.default_rng(1)

    def noisy() -> Policy:
        controller = controller_of(BIG16)
        for cost in (controller.costs.target, controller.costs.draft):
            assert cost is not None
            cost.seconds = np.maximum.accumulate(cost.seconds * rng.lognormal(0, 0.2, len(cost.seconds))).tolist()
        return controller

    assert compare(BIG16, [Text(acceptance)] * 8, noisy) >= least


def test_latency_target_gives_slow_requests_more_and_costs_the_geometric_mean_nothing() -> None:
    def log_rates(is_latency: bool, seed: int) -> list[float]:
        fleet, policy, seconds = Fleet(DEMO, [Text(0.9), Text(0.3)] * 4, seed=seed), controller_of(DEMO), 0.0
        for step in range(1, 301):
            for text in fleet.texts:
                text.weight = step / (step + text.num_tokens) if is_latency else 1.0
            seconds += fleet.step(policy)[1]
        return [float(np.log(text.num_tokens / seconds)) for text in fleet.texts]

    gains = np.mean([np.subtract(log_rates(True, seed), log_rates(False, seed)) for seed in range(20)], axis=0)
    assert gains[1::2].mean() > 0.08 and gains.mean() > -0.015  # -0.004 of 460 runs, with a standard error of 0.0043 for 40


@pytest.mark.parametrize("seed", range(6))
def test_optimum_is_that_of_all_settings(seed: int) -> None:
    rng = np.random.default_rng(seed)
    acceptance, most, missing = rng.uniform(0.3, 0.95, 3), rng.integers(0, 4, 3), rng.integers(1, 50, 3)
    weights = rng.uniform(0.5, 1.5, 3)
    controller = controller_of(DEMO)
    costs = controller.costs
    for num_drafting in (0, 3):
        costs.host.note(3, num_drafting, 3e-4)
    load = Load(
        [
            Candidate(AcceptanceCounts(), int(m), int(owed), 256, True, float(w))
            for m, owed, w in zip(most, missing, weights, strict=True)
        ],
        3,
        600,
    )
    found = best(acceptance, Prices(load, costs))
    of_pass, of_row = costs.draft_line(load)
    num_missing = int(sum(owed - 1 for m, owed in zip(most, missing, strict=True) if m))
    of_missing = (DEMO.draft(3 + num_missing, 0) - DEMO.draft(3, 0)) / max(1, num_missing)

    def rate(nodes: Sequence[int]) -> float:
        tokens = sum(w * sum(a**d for d in range(count + 1)) for w, a, count in zip(weights, acceptance, nodes, strict=True))
        debts = sum((owed - 1) / DEBT_STEPS for count, owed in zip(nodes, missing, strict=True) if count)
        of_draft = max(nodes) * of_pass + sum(nodes) * of_row + debts * of_missing
        return float(tokens / (3e-4 + of_draft + costs.target.predict(3 + sum(nodes), 600)))

    assert found.rate == pytest.approx(rate(found.num_nodes))
    assert found.rate >= 0.99 * max(rate(nodes) for nodes in product(*(range(m + 1) for m in most)))


@pytest.mark.parametrize(("acceptance", "num_nodes", "slack"), [(0.9, 5, 0), (0.65, 3, 2), (0.5, 2, 3)])
def test_a_node_costs_what_it_does_on_this_side_of_a_step(acceptance: float, num_nodes: int, slack: int) -> None:
    """The seventh row takes 0.65 ms, the fifth and the sixth 0.075 each."""
    costs = controller_of(STEP).costs
    found = best([acceptance], Prices(Load([Candidate(AcceptanceCounts(), 6, 1, 256, True)], 1, 0), costs))
    assert (sum(found.num_nodes), found.slack) == (num_nodes, slack)
    assert found.node_seconds < 1e-4


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("machine", MACHINES.values(), ids=str)
def test_the_best_depth_is_found_beyond_one_that_is_worse(machine: Machine, n: int) -> None:
    """Where the target's curve has a step, three nodes may be worse than two, and five better than both."""
    costs = controller_of(machine).costs
    costs.host.note(n, 0, machine.host(n, 0))
    prices = Prices(Load([Candidate(AcceptanceCounts(), 6, 1, 256, True)] * n, n, 128 * n), costs)
    for acceptance in (0.5, 0.8, 0.9, 0.95):
        values = [sum(acceptance**d for d in range(1, depth + 1)) for depth in range(7)]
        rates = [
            n * (1 + values[depth]) / prices.step(n, depth, n * depth * prices.row_seconds, n * depth) for depth in range(1, 7)
        ]
        assert best([acceptance] * n, prices).on_rate >= (1 - 1e-9) * max(rates)


@pytest.mark.parametrize("weight", [1.0, 1 / 60], ids=["throughput", "latency"])
@pytest.mark.parametrize(("n", "most"), [(1, 40), (2, 30), (8, 20)])
def test_plans_may_be_as_deep_as_the_cap(n: int, most: int, weight: float) -> None:
    """Of a drafter without passes that is nearly always right, where the target's further rows cost next to nothing."""
    costs = Costs(PassCost([1, 512], [1.0, 1.001]), None)
    candidates = [Candidate(AcceptanceCounts(), most, 1, 256, True, weight)] * n
    assert best([0.97] * n, Prices(Load(candidates, n, 0), costs)).num_nodes == [most] * n


def rests(controller: Controller, load: Load, num_requests: int, outcome: Outcome) -> bool:
    """Make a step in which the controller rests, if it does."""
    if rest := controller.rest(load, num_requests):
        rest.note(outcome.seconds, outcome.target_seconds)
    return rest is not None


def repeat_rest(controller: Controller, outcome: Outcome) -> None:
    """Make another step of the present rest."""
    assert controller._rest is not None
    controller._rest.note(outcome.seconds, outcome.target_seconds)


def test_what_rests_cost_is_followed_and_drafts_of_before_count_less() -> None:
    controller, num_rests = controller_of(DEMO), 0
    load = Load([Candidate(counts(0.1, 20.0), 6, 2, 256, True) for _ in range(8)], 8, 800)
    usual = Outcome(0, 0, 0, 0, DEMO.host(8, 0) + DEMO.target(8, 800), 0.0, DEMO.target(8, 800))
    slow = usual._replace(seconds=2 * usual.seconds, target_seconds=2 * usual.target_seconds)
    controller.choose(load)
    for step in range(300):
        outcome = usual if step < 100 else slow
        if step == 100:
            before, drafts_before, num_rests = controller.costs.plain_seconds(load), load.candidates[0].counts.num_drafts, 0
        if controller.repeat(True):
            repeat_rest(controller, outcome)
            num_rests += 1
        elif rests(controller, Load((), 8, 800), 8, outcome):
            num_rests += 1
        else:
            decision = controller.choose(load)
            drafting = usual._replace(num_nodes=sum(decision.num_nodes), seconds=2 * usual.seconds)
            controller.observe(drafting if decision.drafts else outcome)
    controller.rest(load, 8)
    controller.choose(load)
    assert 100 < num_rests < 200
    assert controller.costs.plain_seconds(load) > 1.3 * before
    assert load.candidates[0].counts.num_drafts <= IDLE_FADE**num_rests * drafts_before


@pytest.mark.parametrize(("num_slow", "seconds"), [(6, 1.0), (18, 3.0)])
def test_rests_that_something_held_up_tell_nothing_unless_most_were(num_slow: int, seconds: float) -> None:
    rest = Rest(Load((), 8, 800), 8, 1.5)
    for share in num_slow * [3.0] + (20 - num_slow) * [1.0]:
        rest.note(share, share / 2, share / 4)
    assert (rest.typical_seconds, rest.num_steps) == ((seconds / 4, seconds / 2), 20)
    assert rest.seconds == num_slow * 3.0 + (20 - num_slow)
    assert rest.mean_load.num_context_tokens == 800 + 8 * 19 // 2


@pytest.mark.parametrize(("is_right", "stands"), [(False, True), (True, False)])
def test_a_probe_that_shows_no_more_than_was_hoped_for_changes_nothing(is_right: bool, stands: bool) -> None:
    """Drafts so poor that not even a standard error more would pay; comparing once more would take a third of a step."""
    controller, usual = controller_of(DEMO), Outcome(0, 0, 0, 0, DEMO.host(8, 0) + DEMO.target(8, 800), 0.0, DEMO.target(8, 800))
    load = Load([Candidate(counts(0.05, 20.0), 6, 20, 256, True, num_reviewable=16) for _ in range(8)], 8, 800)
    controller._lessons.fleet = counts(0.05, 20.0)
    while not (decision := controller.choose(load)).probed:
        controller.observe(usual)
    for i in decision.reviewed:
        for _ in range(16):
            load.candidates[i].counts.note_draft(0.9 if is_right else 0.05)
            load.candidates[i].counts.note(0.9 if is_right else 0.05, is_right)
    controller.observe(usual._replace(seconds=1.2 * usual.seconds, review_rows=20, review_seconds=DEMO.draft(20, 100)))
    before = controller.optimum
    controller.choose(load)
    assert (controller.optimum is before) == stands


def test_steps_like_a_rest_pass_until_something_changes_or_a_probe_is_due() -> None:
    controller, usual = controller_of(DEMO), Outcome(0, 0, 0, 0, DEMO.host(8, 0) + DEMO.target(8, 800), 0.0, DEMO.target(8, 800))
    load = Load([Candidate(counts(0.1, 20.0), 6, 2, 256, True) for _ in range(8)], 8, 800)
    found, num_rested, probes, price = Counter[str](), 0, controller._probes, 0.0
    for step in range(400):
        is_changed = step % 50 == 49  # then there is a prompt, too
        if controller.repeat(not is_changed):
            repeat_rest(controller, usual)
            found["repeats"], num_rested = found["repeats"] + 1, num_rested + 1
        elif rests(controller, Load((), 40 if is_changed else 8, 800), 8, usual):
            found["rests"], num_rested = found["rests"] + 1, num_rested + 1
        else:
            drafts_before = load.candidates[0].counts.num_drafts
            decision = controller.choose(load)
            if num_rested:
                assert load.candidates[0].counts.num_drafts == pytest.approx(IDLE_FADE**num_rested * drafts_before)
                assert probes.credit + probes.advance <= price + 2 * PROBE_SHARE * usual.seconds
            num_rested = 0
            spent = usual._replace(num_nodes=sum(decision.num_nodes), seconds=2 * usual.seconds) if decision.drafts else usual
            controller.observe(spent)
            found["probes" if decision.is_probe else "decides"] += 1
            price = probes.price or np.inf
    assert found["repeats"] > 3 * found["rests"] > 0 < found["probes"] < 40 and found["decides"]


@pytest.mark.parametrize("slowness", [1.0, 1.05])
def test_rests_right_after_a_probe_are_repeated_and_what_their_cold_caches_cost_is_owed(slowness: float) -> None:
    controller, usual = controller_of(DEMO), Outcome(0, 0, 0, 0, DEMO.host(8, 0) + DEMO.target(8, 800), 0.0, DEMO.target(8, 800))
    load = Load([Candidate(counts(0.1, 20.0), 6, 2, 256, True) for _ in range(8)], 8, 800)
    while not controller.choose(load).is_probe:
        controller.observe(usual)
    controller.observe(usual._replace(num_nodes=1, seconds=1.5 * usual.seconds))
    while not (rest := controller.rest(Load((), 8, 800), 8)):
        controller.choose(load)
        controller.observe(usual)
    num_steps, before = 1 + controller.num_repeats, controller._probes.credit
    assert 1 < num_steps <= COLD_PLAIN_STEPS
    for _ in range(num_steps):
        rest.note(slowness * usual.seconds, slowness * usual.target_seconds)
    controller.rest(Load((), 8, 800), 8)
    load = load._replace(num_context_tokens=800 + 8 * (num_steps - 1) // 2)
    earned, lost = PROBE_SHARE * slowness * usual.seconds, slowness * usual.seconds - controller.costs.plain_seconds(load)
    assert controller._probes.credit - before == pytest.approx(num_steps * (earned - max(0.0, lost)), abs=0.01 * usual.seconds)
    assert slowness == 1.0 or lost > 0.02 * usual.seconds


def repeat(controller: Controller, *outcomes: Outcome) -> None:
    """Steps that draft as the last one."""
    for outcome in outcomes:
        assert controller.repeat(True)
        controller.note_repeat(outcome)


def four_requests(num_missing: int = 2) -> tuple[Load, Outcome, Outcome]:
    """Good drafts on a machine, and what comes of a step with a node each, and of one without drafts."""
    load = Load([Candidate(counts(0.9, 20.0), 6, num_missing, 256, True) for _ in range(4)], 4, 800)
    of_draft, of_target = BIG.draft(4, 800), BIG.target(8, 800)
    drafting = Outcome(4, 4, 1, 4, BIG.host(4, 4) + of_draft + of_target, of_draft, of_target)
    return load, drafting, Outcome(0, 0, 0, 0, BIG.host(4, 0) + BIG.target(4, 800), 0.0, BIG.target(4, 800))


@pytest.mark.parametrize("num_missing", [2, 40])
def test_steps_that_draft_are_repeated_between_comparisons(num_missing: int) -> None:
    """Plain steps come in between all the same; requests that the draft was not fed are looked at again."""
    controller, found, in_a_row = controller_of(BIG), Counter[str](), 0
    load, drafting, plain = four_requests(num_missing)
    drafts = False
    for _ in range(800):
        if controller.repeat(True):
            if drafts:
                controller.note_repeat(drafting)
                found["repeats"], in_a_row = found["repeats"] + 1, in_a_row + 1
            else:
                repeat_rest(controller, plain)
                found["rests"] += 1
        elif rests(controller, Load((), 4, 400), 4, plain):
            found["rests"], drafts = found["rests"] + 1, False
        else:
            drafts, in_a_row = controller.choose(load).drafts, 0
            found["drafts" if drafts else "plain"] += 1
            controller.observe(drafting if drafts else plain)
        assert in_a_row < DWELL
        controller.fleet.note_draft(0.9)
    assert found["rests"] == (NUM_PLAIN - 1) * (found["plain"] - FIRST_STEPS) > 6
    assert (found["repeats"] > 3 * found["drafts"] > 30) == (num_missing == 2) != (found["repeats"] == 0)


def drafting_controller() -> tuple[Controller, Load, Outcome]:
    """One that has drafted in one step, or decided to, and may repeat that."""
    controller, (load, drafting, plain) = controller_of(BIG), four_requests()
    controller.fleet.num_drafts = 20.0
    while not controller.choose(load).drafts:
        controller.observe(plain)
    return controller, load, drafting


@pytest.mark.parametrize("slowness", [1.0, 1.1])
def test_plain_steps_come_although_an_outcome_stands_for_long(slowness: float) -> None:
    """The more often, the less drafting gains; here, comparing seems to take long."""
    (controller, load, drafting), (*_, plain) = drafting_controller(), four_requests()
    slow = {"seconds": slowness * drafting.seconds, "target_seconds": slowness * drafting.target_seconds}
    drafting = drafting._replace(num_accepted=3, **slow)
    controller._standing._comparing.note(4, 1.0)
    in_a_row, most = 0, 0.0
    with patch.object(Standing, "note_comparison"):
        for _ in range(200):
            if num_repeats := controller.num_repeats:
                repeat(controller, *[drafting] * num_repeats)
            else:
                controller.rest(Load((), 4, 400), 4)
                drafts = controller.choose(load).drafts
                controller.observe(drafting if drafts else plain)
            controller.fleet.note_draft(0.9)
            in_a_row = in_a_row + max(1, num_repeats) if drafts else 0
            gain = controller.optimum.rate / controller.optimum.off_rate - 1
            most = max(most, (in_a_row - 1) / (PLAIN_STEPS * (1 + min(gain, 1.0) / PLAIN_GAIN)))
    assert 0.5 < most <= 1.0


@pytest.mark.parametrize(
    ("seconds", "num_drafts", "num_all", "num_nodes", "num_steps"),  # num_all: nodes of each of the last three requests
    [
        (0.0, 14.2, 2, [12, 12, 12, 12, 12], [8, 8, 8, 8, 8]),
        (0.05, 14.2, 2, [12, 12, 12, 12, 12], [8, 16, 20, 20, 20]),
        (1.0, 14.2, 2, [12, 8, 13, 12, 12], [8, 8, 8, 16, 32]),
        (1.0, 14.2, 2, [12, 12, 9, 11, 14, 14], [8, 16, 32, 64, 128, 128]),
        (1.0, 14.2, 0, [12, 12, 12, 12, 12], [8, 16, 16, 16, 16]),
        (1.0, 3.1, 2, [12, 12, 12, 12, 12], [3, 3, 3, 3, 3]),
    ],
)
def test_comparisons_are_fewer_where_they_take_long_come_out_alike_and_there_is_evidence(
    seconds: float, num_drafts: float, num_all: int, num_nodes: list[int], num_steps: list[int]
) -> None:
    standing, (load, *_), found = Standing(), four_requests(), list[int]()
    standing.renew(load, [0] * 4, num_drafts, 1.0)
    for _ in range(40):
        standing.note_comparison(seconds + 1e-6)
    for count in num_nodes:
        standing.renew(load, [count - 3 * num_all, *[num_all] * 3], num_drafts, 1.0)
        found.append(standing.num_left)
    assert found == num_steps


@pytest.mark.parametrize("num_requests", [1, 8])
@pytest.mark.parametrize(("p", "num_nodes", "most"), [(0.9, 6, 12), (0.9, 2, 15), (0.7, 4, 25)])
def test_an_outcome_stands_no_longer_where_drafts_bring_much_less(num_requests: int, p: float, num_nodes: int, most: int) -> None:
    """Acceptance falls to 0.2. Drafts that bring what they did end it hardly ever, though chance has its part."""
    rng, (load, *_) = np.random.default_rng(num_requests), four_requests()

    def brought(acceptance: float) -> int:
        return int(np.minimum(rng.geometric(1 - acceptance, num_requests) - 1, num_nodes).sum())

    num_until, num_early = list[int](), 0
    for _ in range(100):
        standing = Standing()
        standing.note_comparison(1.0)
        for _ in range(5):
            standing.renew(load, [num_nodes] * 4, 14.2, 1.0)
            for _ in range(standing.num_left):
                standing.note_drafts(brought(p))
                if not standing.num_left:
                    num_early += 1
                    break
        standing.renew(load, [num_nodes] * 4, 14.2, 1.0)
        num_until.append(0)
        while standing.num_left and num_until[-1] < 100:
            standing.note_drafts(brought(0.2))
            num_until[-1] += 1
    assert num_early <= 0.001 * 100 * (8 + 16 + 32 + 64 + 128)
    assert np.quantile(num_until, 0.95) <= most


def test_a_decision_is_of_its_requests_in_whatever_order_they_come() -> None:
    """Or where one of them has been preempted, and another one, which has emitted before, is in its place."""
    controller, load, outcome = drafting_controller()
    mixed = load._replace(candidates=[Candidate(counts(p, 500.0), 6, 2, 256, True) for p in (0.8, 0.8, 0.8, 0.001)])
    controller._standing.num_left = 0
    decision = controller.choose(mixed)
    assert [worth is not None for worth in decision.worths] == [True, True, True, False]
    controller.observe(outcome._replace(num_nodes=sum(decision.num_nodes)))
    assert controller._standing.num_left > 0 and not controller.rest(Load((), 4, 400), 4)
    turned = controller.choose(mixed._replace(candidates=mixed.candidates[::-1]))
    assert [worth is not None for worth in turned.worths] == [False, True, True, True]
    controller.observe(outcome._replace(num_nodes=sum(turned.num_nodes)))
    assert [worth is not None for worth in controller.choose(load).worths] == [True] * 4


def test_a_long_context_is_fed_beside_requests_that_draft() -> None:
    """However long that takes; of several, one at a time."""
    controller, load, drafting = drafting_controller()
    controller.observe(drafting)
    short, long = Candidate(counts(0.9, 500.0), 6, 1, 10_000, True), Candidate(counts(0.9, 500.0), 6, 4000, 10_000, True)
    decision = controller.choose(load._replace(candidates=[short, long._replace(num_missing=4001), long, short]))
    assert [bool(count) for count in decision.num_nodes] == [True, False, True, True]


def test_fewer_requests_are_fed_at_once_while_few_drafts_were_seen() -> None:
    """What is known then may prove wrong after a step or two; drafts that teach nothing about others count, too."""
    fed = list[int]()
    for num_drafts, own_drafts in ((2.0, 2.0), (4.0, 2.0), (20.0, 2.0), (2.0, 20.0)):
        controller, load, _ = drafting_controller()
        controller.fleet.num_drafts = num_drafts
        owing = [Candidate(counts(0.9, own_drafts), 6, 20, 10_000, True) for _ in range(4)]
        fed.append(sum(map(bool, controller.choose(load._replace(candidates=owing)).num_nodes)))
    assert fed == sorted(fed) and 1 <= fed[0] < fed[1] < fed[2] == fed[3] == 4


def test_drafts_that_did_not_come_are_not_repeated() -> None:
    """A drafter failed, or the step ran in parts, of which nothing is told; one that looked and was too unsure has not failed."""
    controller, _, outcome = drafting_controller()
    controller.observe(outcome)
    num_repeats, nothing = controller.num_repeats, outcome._replace(num_nodes=0, num_accepted=0, num_draft_passes=0)
    repeat(controller, nothing._replace(num_draft_passes=1, num_draft_rows=4))
    assert controller.num_repeats == num_repeats - 1 > 0
    repeat(controller, nothing)
    assert not controller.num_repeats
    controller, load, outcome = drafting_controller()
    controller.observe(outcome)
    assert controller.choose(load).is_steady  # for a step that then runs in parts
    assert not controller.num_repeats


@pytest.mark.parametrize("num_missing", [1, 40])
def test_a_draft_that_fails_at_every_step_is_given_up(num_missing: int) -> None:
    """Although what it has not been fed excuses a draft that runs passes."""
    for has_passes in (True, False):
        controller, load, outcome = drafting_controller()
        behind = load._replace(candidates=[each._replace(num_missing=num_missing) for each in load.candidates])
        num_passes = int(has_passes)
        for _ in range(100):
            is_drafting = controller.choose(behind).drafts
            passes = {"num_draft_passes": num_passes * is_drafting, "num_draft_rows": 4 * num_passes * is_drafting}
            controller.observe(outcome._replace(num_nodes=0, num_accepted=0, **passes))
        assert controller.optimum.drafts == (has_passes and num_missing > 1)


def test_what_was_drafted_is_learned_before_a_comparison_that_comes_early() -> None:
    controller, load, outcome = drafting_controller()
    before = controller.costs.target.predict(8, 800)
    controller.observe(outcome._replace(target_seconds=0.9 * outcome.target_seconds))
    assert controller.costs.target.predict(8, 800) == before
    assert not controller.rest(Load((), 5, 400), 5, 1)
    controller.choose(load._replace(candidates=[*load.candidates, load.candidates[0]], num_rows=5))
    assert controller.costs.target.predict(8, 800) < before


@pytest.mark.parametrize("num_others", [0, 100], ids=["nothing else", "a longer prompt beside it"])
def test_a_new_request_is_compared_for_once_and_not_for_the_rows_of_its_prompt(num_others: int) -> None:
    controller, load, outcome = drafting_controller()
    controller.observe(outcome)
    new = load.candidates[0]._replace(num_missing=61)
    joined = load._replace(candidates=[*load.candidates, new], num_rows=5 + num_others)
    ends = joined._replace(num_rows=joined.num_rows + 60, num_ending=60)
    assert not controller.rest(ends._replace(candidates=()), 5, 1)
    decision, optimum = controller.choose(ends), controller.optimum
    controller.observe(outcome._replace(num_nodes=sum(decision.num_nodes)))
    for _ in range(3):
        assert not controller.rest(joined._replace(candidates=()), 5)
        assert controller.choose(joined).num_nodes == decision.num_nodes
    assert controller.optimum is optimum
    other, same, _ = drafting_controller()
    other.observe(outcome)
    other.rest(joined._replace(candidates=()), 5, 1)
    other.choose(joined._replace(candidates=[*same.candidates, new]))
    assert other.optimum == controller.optimum and other.optimum.num_nodes == decision.num_nodes
    assert other._standing.num_left == controller._standing.num_left + 3, "it stands as long"


@pytest.mark.parametrize("tells_passes", [True, False], ids=["passes are known", "passes are not known"])
@pytest.mark.parametrize("share", [1.0, 0.5], ids=["as planned", "half of that"])
def test_drafting_ends_where_it_brings_less_than_was_planned(share: float, tells_passes: bool) -> None:
    """What is known of acceptance stays as it is: the fault lies elsewhere."""
    controller, num_drafting = Controller(Costs(BIG.curve(BIG.target), BIG.curve(BIG.draft))), 0
    rng, load = np.random.default_rng(0), Load([Candidate(counts(0.7, 20.0), 6, 2, 256, False) for _ in range(4)], 4, 400)
    is_rest = False
    for _ in range(200):
        plain = Outcome(0, 0, 0, 0, BIG.host(4, 0) + BIG.target(4, 400), 0.0, BIG.target(4, 400))
        if not (is_repeated := controller.repeat(True)):
            is_rest = controller.rest(Load((), 4, 400), 4) is not None
            if not is_rest:
                decision = controller.choose(load)
        if is_rest:
            repeat_rest(controller, plain)
            continue
        if not decision.drafts:
            controller.observe(plain)
            continue
        num_drafting += not decision.is_probe
        nodes = decision.num_nodes
        expected = sum(p * (1 - p**count) / (1 - p) for p, count in zip(controller.compared.estimates.means, nodes, strict=True))
        passes, rows = max(nodes), sum(nodes)
        draft, target = passes * BIG.draft(rows / passes, 400), BIG.target(4 + rows, 400)
        seconds = BIG.host(4, sum(map(bool, nodes))) + draft + target
        told = (passes, rows) if tells_passes else (0, 0)
        outcome = Outcome(sum(nodes), int(rng.poisson(share * expected)), *told, seconds, draft, target)
        if is_repeated:
            controller.note_repeat(outcome)
        else:
            controller.observe(outcome)
    assert num_drafting > 150 if share == 1.0 else 0 < num_drafting < 60


def counts(acceptance: float, num_drafts: float) -> AcceptanceCounts:
    return AcceptanceCounts(acceptance * num_drafts, acceptance * num_drafts, acceptance, num_drafts)


def test_requests_that_differ_are_believed_sooner_and_count_alike() -> None:
    fleet = counts(0.5, 2)
    same = estimate(fleet, PastRequests(), [counts(0.5, 10)] * 4 + [counts(0.9, 1)]).means[-1]
    different = estimate(fleet, PastRequests(), [counts(0.05, 10), counts(0.95, 10)] * 2 + [counts(0.9, 1)]).means[-1]
    assert same < 0.6 < 0.65 < different
    busy = estimate(fleet, PastRequests(), [counts(0.9, 30), *[counts(0.1, 3)] * 3, counts(0.5, 0)]).means[-1]
    assert busy < 0.45  # the mean of all drafts would be 0.7


def test_requests_that_have_left_tell_by_how_much_requests_differ() -> None:
    """Of the same mean, those that differed let a new request's own drafts count for more."""
    found = list[float]()
    for shown in ((0.5, 0.5), (0.05, 0.95)):
        past, gone = PastRequests(), [counts(p, 10.0) for p in shown * 4]
        past.follow(gone, 1.0)
        past.follow([], 1.0)
        found.append(estimate(AcceptanceCounts(), past, [counts(0.9, 4.0)]).means[0])
    assert 0.5 < found[0] < 0.6 < 0.75 < found[1] < 0.9


def test_a_draft_that_is_less_sure_than_it_is_right_is_believed_to_be_right() -> None:
    """Growth goes by its confidence all the same."""
    found = estimate(counts(0.5, 0), PastRequests(), [AcceptanceCounts(18.0, 9.0, 0.3, 1000.0)])
    assert found.means == pytest.approx([0.3 * 20 / 11], rel=0.02)
    assert found.agreements == [1.0]


def test_what_drafting_brought_more_than_planned_is_not_forgotten() -> None:
    more, less = Yield(), Yield()
    more.note(40, 20.0)
    less.note(20, 40.0)
    before = more.factor, less.factor
    for each in (more, less):
        each.fade(1)
    assert more.factor == before[0] > 1 > less.factor > before[1]


@pytest.mark.long_where("150M")
@pytest.mark.parametrize("machine", [DEMO, BIG16], ids=str)
def test_a_request_starts_with_what_the_requests_before_it_showed(machine: Machine) -> None:
    """One at a time, every other one of them with hardly any use for drafts: no fixed length fits both, and a bad one says nothing
    of the next."""

    def draw(rng: np.random.Generator) -> float:
        return float(rng.choice([0.9, 0.3]))

    serve = partial(against_off, machine, draw, at_once=1, num_requests=60)
    mine = serve(adaptive(machine), seeds=9).rate
    assert mine >= 1.06 * max(serve(partial(Fixed, length), seeds=3).rate for length in (1, 2, 4))


def test_what_drafting_lost_that_seemed_to_pay_does_not_put_off_probes_for_long() -> None:
    probes = Probes(price=0.5)
    for _ in range(50):
        probes.observe(2.0, 1.0, 0, 1)  # a step that takes twice as long, and in which nothing is accepted
    assert not probes.is_due
    for _ in range(150):
        probes.observe(1.0, 1.0, None, 1)
    assert probes.is_due


def test_drafters_that_cannot_review_draft_a_node_now_and_then() -> None:
    for machine, n in ((DEMO, 8), (BIG16, 1)):
        assert compare(machine, [Text(0.2)] * n, adaptive(machine), may_review=False) >= 0.97
    assert compare(DEMO, [Text(0.9)] * 8, adaptive(DEMO), seeds=11, may_review=False) >= 1.4


def test_a_review_waits_until_there_is_enough_to_see() -> None:
    """Meanwhile rests may be repeated, and nothing is chosen."""
    probes, costs = Probes(credit=1.0), controller_of(DEMO).costs

    def load(*num_reviewable: int) -> Load:
        return Load([Candidate(AcceptanceCounts(), 6, 200, 256, True, num_reviewable=each) for each in num_reviewable], 2, 400)

    assert probes.choose(load(1, LEAST_REVIEWED - 4), costs, [0, 0], [0.5, 0.5], [1, 1]) == ()
    assert not probes.is_due and probes.num_steps_until_due(1e-3, 20) == 4 and probes.num_steps_until_due(1e-3, 3) == 3
    for _ in range(4):
        assert not probes.is_due
        probes.add_time(1e-3)
    assert probes.is_due and probes.choose(load(5, LEAST_REVIEWED), costs, [0, 0], [0.5, 0.5], [1, 1]) == [1]
    assert probes.choose(load(16, 16), costs, [1, 0], [0.5, 0.5], [1, 0]) == [1]
    assert probes.choose(load(16, 16), costs, [1, 1], [0.5, 0.5], [1, 1]) == () and probes.price == np.inf


def test_a_review_that_is_too_dear_so_far_is_known_before_it_is_time_for_it() -> None:
    """So that rests go on."""
    probes, costs, missing = Probes(), controller_of(DEMO).costs, AcceptanceCounts(0.5, 20.0, 0.5, 20.0)

    def load(num_reviewable: int) -> Load:
        return Load([Candidate(missing, 6, num_reviewable + 1, 256, True, num_reviewable=num_reviewable)], 1, 400)

    assert probes.choose(load(0), costs, [0], [0.1], [0]) == () and probes.num_waiting == LEAST_REVIEWED
    price = probes.price
    probes.add_time(1e-3, LEAST_REVIEWED)
    assert not probes.num_waiting and not probes.is_due
    probes.add_time(price / PROBE_SHARE)
    assert probes.is_due and probes.choose(load(LEAST_REVIEWED), costs, [0], [0.1], [0]) == [0]
    assert probes.price == pytest.approx(price)


def test_what_probes_cost_is_owed_in_full() -> None:
    probes = Probes(price=0.5, credit=1.0)
    for _ in range(3):
        probes.observe(1.5, 1.0, 0, 1, is_probe=True)
    for _ in range(10):
        probes.observe(1.0, 1.0, None, 1)
    assert probes.credit == pytest.approx(1.0 + 3 * (1.5 * PROBE_SHARE - 0.5) + 10 * PROBE_SHARE, abs=0.02)
    for _ in range(5):
        probes.observe(3.0, 1.0, 0, 1, is_probe=True)
    assert probes.credit < -8


def test_what_cold_caches_cost_after_a_probe_is_owed_also_where_nobody_looked() -> None:
    """Five steps after one take a fifth longer than usual; the times of some of them come as a sum."""
    one_by_one, together = (Probes(price=100.0, num_cold=5) for _ in range(2))
    for step in range(8):
        one_by_one.observe(1.2 if step < 5 else 1.0, 1.0, None, 1)
    for seconds, num_steps in ((1.2, 1), (4.8, 4), (3.0, 3)):
        together.observe(seconds, 1.0, None, 1, num_steps=num_steps)
    for probes in (one_by_one, together):
        assert probes.credit == pytest.approx(9 * PROBE_SHARE - 5 * 0.2) and not probes.num_cold


def test_a_price_that_rises_a_little_puts_off_no_probe() -> None:
    """As it does when the costs that it goes by are followed."""
    probes = Probes(price=5.0)
    for _ in range(1000):
        probes.observe(1.0, 1.0, None, 1)
        probes.price *= 1 + 1e-6
        if probes.is_due:
            break
    assert probes.is_due


def test_a_review_shows_that_the_draft_is_cheaper_than_it_was_taken_for() -> None:
    """Not that it is dearer: its pass gives more logits than one of growth, and is prepared in Python."""
    costs, expected = controller_of(DEMO).costs, DEMO.draft(60, 200)
    assert costs.draft is not None
    load = Load([Candidate(AcceptanceCounts(), 6, 60, 256, True) for _ in range(4)], 4, 800)
    for seconds, least, most in ((3 * expected, 0.99, 1.01), (expected / 3, 0.3, 0.5), (expected, 0.3, 0.5)):
        for _ in range(30):
            costs.note_review(load, 1, Outcome(0, 0, 0, 0, 1.0, 0.0, 0.0, review_rows=60, review_seconds=seconds))
        assert least <= costs.draft.predict(60, 200) / expected <= most
