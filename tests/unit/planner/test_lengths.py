"""Laws of lengths against big samples, published ratios and limits."""

import json
import math
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.schema import CurriculumConfig, FlowConfig
from headrace.errors import PlanError
from headrace.flow.events import MemberEnded
from headrace.flow.stimulus import Setup, write_setup, write_stimulus
from headrace.planner.lengths import LengthLaw, LognormalLaw, PoolLaw, held_moment, length_law
from headrace.planner.spec import ResponseConfig
from headrace.records import Outcome

LAWS = {
    "default": ResponseConfig(),
    "at_cap": ResponseConfig(mean_tok=3203, cap_tok=4096),
    "independent": ResponseConfig(sigma=0.8, sigma_within=0.8, cap_tok=10_000),
    "between_only": ResponseConfig(sigma=0.8, sigma_within=0.0),
    "mixture": ResponseConfig(law="mixture", long_frac=0.2, sigma=0.6),
    "uniform": ResponseConfig(law="uniform", mean_tok=700),
    "uniform_cut": ResponseConfig(law="uniform", mean_tok=700, cap_tok=900),
    "short": ResponseConfig(mean_tok=40, cap_tok=100),
}


@pytest.fixture(params=LAWS)
def law(request: pytest.FixtureRequest) -> LengthLaw:
    return length_law(LAWS[request.param])


def sample(law: LengthLaw, groups: int, members: int, seed: int = 5) -> np.ndarray:
    return law.draw(np.random.default_rng(seed), groups, members)


@pytest.mark.parametrize("name", LAWS)
def test_the_mean_after_the_cap_is_the_one_asked_for(name: str) -> None:
    asked = LAWS[name].mean_tok
    law = length_law(LAWS[name])
    assert law.mean_tok == pytest.approx(asked, rel=2e-4)
    assert sample(law, 60_000, 4).mean() == pytest.approx(asked, rel=0.015)


def test_moments_are_those_of_big_samples(law: LengthLaw) -> None:
    drawn = sample(law, 40_000, 8)
    assert np.square(drawn, dtype=float).mean() == pytest.approx(law.second_moment(), rel=0.04)
    for at in (1.0, 50.0, 500.0, 700.0, 1999.5, 4095.0):
        assert (drawn > at).mean() == pytest.approx(float(law.survival(np.array([at]))[0]), abs=0.006)
    for q in (0.1, 0.5, 0.9, 0.99):
        assert np.quantile(drawn, q) == pytest.approx(law.quantile(q), rel=0.04)


def test_the_longest_is_that_of_big_samples(law: LengthLaw) -> None:
    drawn = sample(law, 40_000, 8)
    assert drawn.max(axis=1).mean() == pytest.approx(law.max_of_members(8), rel=0.015)
    batches = drawn.reshape(1_250, 32, 8).max(axis=(1, 2)).mean()
    assert batches == pytest.approx(law.max_of(32, 8), rel=0.02)


def test_the_longest_of_independent_uniform_lengths_is_exact() -> None:
    law = length_law(LAWS["uniform"])  # 1..1399, mean 700
    top = 1399
    exact = top - sum((k / top) ** 64 for k in range(1, top))
    assert law.max_of(8, 8) == pytest.approx(exact, rel=1e-3)
    assert law.max_of(1, 1) == pytest.approx(700.0, rel=1e-3)


def test_one_response_is_its_own_longest(law: LengthLaw) -> None:
    assert law.max_of(1, 1) == pytest.approx(law.mean_tok, rel=1e-3)


def test_the_longest_grows_with_groups_and_members_up_to_the_cap(law: LengthLaw) -> None:
    grown = [law.max_of(g, m) for g, m in ((1, 1), (1, 4), (1, 16), (16, 16), (256, 16), (4096, 16))]
    assert grown == sorted(grown)
    assert grown[-1] <= law.cap_tok


def test_siblings_correlate_as_the_spec_says() -> None:
    law = length_law(ResponseConfig(sigma=1.0, sigma_within=0.35, cap_tok=10_000_000))
    logs = np.log(sample(law, 60_000, 2))
    assert np.corrcoef(logs[:, 0], logs[:, 1])[0, 1] == pytest.approx(1 - 0.35**2, abs=0.01)
    assert (logs - logs.mean(axis=1, keepdims=True)).var() * 2 == pytest.approx(0.35**2, rel=0.03)


# --- published ratios (PLANNER 3.2) -----------------------------------------------------------------------------


def test_marin_shares_above_two_caps() -> None:
    # issue 8936: 14.6 % above 2,048, 3.6 % above 4,096; sigma = ln 2 / (z(.036) - z(.146))
    z = NormalDist().inv_cdf
    sigma = math.log(2.0) / (z(1 - 0.036) - z(1 - 0.146))
    assert sigma == pytest.approx(0.93, abs=0.01)
    law = LognormalLaw(medians_tok=(770.0,), sigma=sigma, cap_tok=8192)
    above = law.survival(np.array([2048.0, 4096.0]))
    assert above == pytest.approx([0.146, 0.036], abs=0.002)
    same = length_law(ResponseConfig(mean_tok=law.mean_tok, cap_tok=8192, sigma=sigma, sigma_within=0.3))
    assert isinstance(same, LognormalLaw)
    assert same.medians_tok[0] == pytest.approx(770.0, rel=1e-6)


def test_applied_compute_tailness_of_a_group() -> None:
    # 1.42 to 1.45 for Qwen3-8B; within-group sigma .27 at 8 members, whatever lies between prompts
    for sigma in (0.27, 1.0):
        law = length_law(ResponseConfig(sigma=sigma, sigma_within=0.27, mean_tok=1354, cap_tok=10_000_000))
        assert 1.42 <= law.max_of_members(8) / law.mean_tok <= 1.45


def test_the_talks_longest_of_1280() -> None:
    # p99 40.9 s, longest 119.8 s: a typical longest lies at z(1 - .56 / n), its mean a little above
    sigma = 1.07
    law = length_law(ResponseConfig(sigma=sigma, sigma_within=sigma, mean_tok=6000, cap_tok=10_000_000))
    typical = math.exp(sigma * (NormalDist().inv_cdf(1 - 0.56 / 1280) - NormalDist().inv_cdf(0.99)))
    assert typical == pytest.approx(119.8 / 40.9, rel=0.02)
    assert 1.0 < law.max_of(40, 32) / law.quantile(0.99) / typical < 1.12


# --- limits ------------------------------------------------------------------------------------------------------


def test_no_spread_is_a_constant() -> None:
    for config in (ResponseConfig(sigma=0.0, sigma_within=0.0, mean_tok=777), ResponseConfig(law="constant")):
        law = length_law(config)
        assert np.unique(sample(law, 50, 4)).tolist() == [config.mean_tok]
        assert law.max_of(64, 16) == law.mean_tok == law.quantile(0.01) == config.mean_tok
        assert law.second_moment() == config.mean_tok**2
        assert law.survival(np.array([config.mean_tok - 1, config.mean_tok])).tolist() == [1.0, 0.0]


def test_a_mean_too_near_the_cap_names_what_is_possible() -> None:
    with pytest.raises(PlanError, match=r"too near cap_tok = 4096.*mean_tok up to 4085") as error:
        length_law(ResponseConfig(mean_tok=4096, cap_tok=4096))
    largest = float(str(error.value).split("mean_tok up to ")[1].split(",")[0])
    assert length_law(ResponseConfig(mean_tok=largest, cap_tok=4096)).mean_tok == pytest.approx(largest)
    with pytest.raises(PlanError, match="too near cap_tok"):
        length_law(ResponseConfig(law="uniform", mean_tok=4096, cap_tok=4096))
    assert length_law(ResponseConfig(law="constant", mean_tok=4096, cap_tok=4096)).mean_tok == 4096
    with pytest.raises(PlanError, match="at least 1 token"):
        length_law(ResponseConfig(mean_tok=0.5))


def test_a_cap_of_one_token() -> None:
    for name in ("lognormal", "constant", "uniform", "mixture"):
        law = length_law(ResponseConfig(law=name, mean_tok=1.0, cap_tok=1))
        assert law.mean_tok == law.max_of(4, 4) == law.quantile(0.5) == 1.0
        assert sample(law, 3, 2).tolist() == [[1, 1]] * 3


def test_the_limited_moment_is_the_integral() -> None:
    t = np.linspace(1.0, 3000.0, 2_000_001)
    x = (np.log(t) - math.log(800.0)) / 1.2
    above = np.array([0.5 * math.erfc(v / math.sqrt(2)) for v in x[::50]])
    grid = t[::50]
    assert held_moment(1, 800.0, 1.2, 3000.0) == pytest.approx(1.0 + np.trapezoid(above, grid), rel=1e-6)
    assert held_moment(2, 800.0, 1.2, 3000.0) == pytest.approx(1.0 + np.trapezoid(2 * grid * above, grid), rel=1e-6)


def test_scaling_moves_lengths_and_leaves_the_cap(law: LengthLaw) -> None:
    grown = law.scaled(1.7)
    assert grown.cap_tok == law.cap_tok
    assert (sample(grown, 100, 4) >= sample(law, 100, 4)).all()
    assert law.mean_tok < grown.mean_tok <= 1.7 * law.mean_tok * 1.001
    assert grown.scaled(1 / 1.7).mean_tok == pytest.approx(law.mean_tok, rel=1e-9)
    with pytest.raises(PlanError, match="scaled by"):
        law.scaled(0.0)


def test_further_members_of_the_same_prompts() -> None:
    law = length_law(LAWS["between_only"])
    one = law.draw(np.random.default_rng(1), 20, 4, np.random.default_rng(2))
    two = law.draw(np.random.default_rng(1), 20, 4, np.random.default_rng(3))
    assert (one == two).all()  # all that varies lies between prompts
    spread = length_law(LAWS["default"])
    one = spread.draw(np.random.default_rng(1), 2000, 4, np.random.default_rng(2))
    two = spread.draw(np.random.default_rng(1), 2000, 4, np.random.default_rng(3))
    assert (one != two).mean() > 0.9
    assert np.corrcoef(np.log(one[:, 0]), np.log(two[:, 0]))[0, 1] > 0.8


# --- properties --------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(["lognormal", "uniform", "mixture"]),
    cap=st.integers(2, 200_000),
    share=st.floats(0.05, 0.9),
    sigma=st.floats(0.0, 2.0),
    within=st.floats(0.0, 1.0),
)
def test_lengths_lie_between_one_and_the_cap(name: str, cap: int, share: float, sigma: float, within: float) -> None:
    mean = max(1.0, share * cap)
    config = ResponseConfig(
        law=name, mean_tok=mean, cap_tok=cap, sigma=sigma, sigma_within=within * sigma, long_frac=0.3
    )
    law = length_law(config)
    drawn = sample(law, 50, 4)
    assert drawn.shape == (50, 4)
    assert drawn.dtype == np.int64
    assert drawn.min() >= 1
    assert drawn.max() <= cap
    assert law.mean_tok == pytest.approx(mean, rel=0.02, abs=1.0)
    assert law.mean_tok**2 <= law.second_moment() * (1 + 1e-9)
    assert law.mean_tok * 0.99 <= law.max_of(3, 4) <= cap
    assert 1 <= law.quantile(0.01) <= law.quantile(0.99) <= cap


@settings(deadline=None, max_examples=30)
@given(mean=st.floats(500, 3000), cap=st.integers(4000, 20_000), factor=st.integers(2, 20), sigma=st.floats(0.1, 1.5))
def test_shape_does_not_depend_on_the_scale(mean: float, cap: int, factor: int, sigma: float) -> None:
    small = length_law(ResponseConfig(mean_tok=mean, cap_tok=cap, sigma=sigma, sigma_within=sigma / 2))
    config = ResponseConfig(mean_tok=mean * factor, cap_tok=cap * factor, sigma=sigma, sigma_within=sigma / 2)
    large = length_law(config)
    assert large.max_of(16, 8) / large.mean_tok == pytest.approx(small.max_of(16, 8) / small.mean_tok, rel=2e-3)
    assert large.quantile(0.9) / small.quantile(0.9) == pytest.approx(factor, rel=0.03)


# --- files -------------------------------------------------------------------------------------------------------


def written(path: Path, lines: list[object]) -> ResponseConfig:
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return ResponseConfig(law="file", path=str(path), cap_tok=1000)


def test_a_file_of_numbers_and_objects(tmp_path: Path) -> None:
    config = written(tmp_path / "a.jsonl", [100, {"response_tok": 300}, {"output_length": 5000}, {"generated_tok": 7}])
    law = length_law(config)
    assert law.mean_tok == (100 + 300 + 1000 + 7) / 4
    assert law.quantile(0.5) == 100
    assert set(np.unique(sample(law, 500, 2))) == {7, 100, 300, 1000}
    assert "names no groups" in law.note
    assert "0.88" in law.note  # 1 - .35^2


def test_groups_of_a_file_keep_their_correlation(tmp_path: Path) -> None:
    truth = LognormalLaw(medians_tok=(400.0,), sigma=1.0, tie=0.7, cap_tok=1000)
    drawn = sample(truth, 1500, 6)
    lines = [{"response_tok": n, "group_id": f"g{g}"} for g, row in enumerate(drawn.tolist()) for n in row[: 3 + g % 4]]
    law = length_law(written(tmp_path / "g.jsonl", lines))
    assert isinstance(law, PoolLaw)
    assert law.tie == pytest.approx(0.7, abs=0.06)  # ties at the cap carry less
    assert law.max_of(16, 6) == pytest.approx(truth.max_of(16, 6), rel=0.02)
    assert law.max_of_members(6) == pytest.approx(truth.max_of_members(6), rel=0.03)
    assert "members of its groups correlate" in law.note


def test_a_run_folder(tmp_path: Path) -> None:
    setup = Setup(flow=FlowConfig(), curriculum=CurriculumConfig(), prompts=10, seed=0)

    def ended(group: int, member: int, tok: int, outcome: Outcome = Outcome.OK) -> MemberEnded:
        return MemberEnded(
            time_s=1.0,
            group_id=f"g{group}",
            member=member,
            attempt=0,
            outcome=outcome,
            reward=1.0,
            generated_tok=tok,
            oldest_version=0,
            newest_version=0,
        )

    first = [ended(g, m, 100 * (g + 1)) for g in range(4) for m in range(2)]
    later = [ended(3, 0, 400), ended(5, 0, 9999, Outcome.CANCELLED), ended(5, 1, 600), ended(5, 2, 600)]
    for version, events in ((0, first), (3, later)):
        lines = [write_setup(setup)] + [write_stimulus(event, []) for event in events]
        (tmp_path / f"stimulus-v{version:06d}.jsonl").write_text("\n".join(lines) + "\n")
    law = length_law(ResponseConfig(law="file", path=str(tmp_path)))
    assert isinstance(law, PoolLaw)
    assert law.sorted_tok.tolist() == [100, 100, 200, 200, 300, 300, 400, 400, 600, 600]
    assert law.tie == 1.0
    one_log = length_law(ResponseConfig(law="file", path=str(tmp_path / "stimulus-v000003.jsonl")))
    assert one_log.mean_tok == pytest.approx((400 + 600 + 600) / 3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no lengths"),
        ("12\nx\n", "line 2: no JSON"),
        ('{"response_toks": 3}', "line 1.*did you mean 'response_tok'"),
        ("{}", "line 1.*valid names"),
        ("0", "line 1: 0 is not a length"),
        ("NaN", "line 1: nan is not a length"),
        ("true", "line 1: True is not a length"),
        ('"12"', "line 1: '12' is not a length"),
        ('{"setup": {"flow"', "cannot be read"),
    ],
)
def test_a_bad_file_names_its_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(PlanError, match=words):
        length_law(ResponseConfig(law="file", path=str(path)))


def test_a_missing_file_or_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read"):
        length_law(ResponseConfig(law="file", path=str(tmp_path / "none.jsonl")))
    with pytest.raises(PlanError, match="without stimulus"):
        length_law(ResponseConfig(law="file", path=str(tmp_path)))
