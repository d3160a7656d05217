import json

import pytest

from headrace.errors import PlanError
from headrace.planner.constants import Constants, MeasuredLaw, ServingSet, builtin, load, save, weakest
from headrace.planner.facts import Fact


def fact(value: float, grade: str = "fitted") -> Fact:
    return Fact(value=value, unit="s", source="test", date="2026-11-29", grade=grade)  # type: ignore[arg-type]


def serving(engine: str, precision: str, mem_eff: float, chip: str = "h100") -> ServingSet:
    return ServingSet(chip=chip, engine=engine, precision=precision, facts={"mem_eff": fact(mem_eff)})


def test_every_seed_says_where_and_when_it_comes_from():
    for name in Constants.model_fields:
        seed = getattr(builtin(), name)
        if isinstance(seed, Fact):
            assert seed.source, name
            assert seed.unit, name
            assert len(seed.date) == 10, name


def test_a_calibration_comes_back_from_its_file_unchanged(tmp_path):
    law = MeasuredLaw(
        model="m", chip="cpu", base_s=fact(0.01), per_request_s=fact(1e-4), per_context_tok_s=fact(1e-8, "measured")
    )
    mine = Constants(name="mine", serving=(serving("vllm", "fp8", 0.7),), laws=(law,), step_s=fact(0.002))
    path = save(mine, tmp_path / "deep")
    assert load("mine", tmp_path / "deep") == mine
    assert load(str(path)) == mine
    assert [p.name for p in path.parent.iterdir()] == ["mine.json"]


def test_no_name_and_builtin_mean_the_seeds(tmp_path):
    assert load("") == load("builtin", tmp_path) == builtin()


def test_an_unknown_calibration_names_the_nearest(tmp_path):
    save(Constants(name="cluster-a"), tmp_path)
    with pytest.raises(PlanError, match="did you mean 'cluster-a'"):
        load("cluster-b", tmp_path)


@pytest.mark.parametrize("name", ["", "builtin", "a/b", "../up"])
def test_a_calibration_needs_a_plain_name_of_its_own(tmp_path, name):
    with pytest.raises(PlanError, match="plain name"):
        save(Constants(name=name), tmp_path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"mem_ef": 1}, "mem_ef: Extra inputs"),
        ({"mem_eff": {"value": 1}}, "mem_eff.unit"),
        ({"serving": [{"chip": "h100", "facts": {"mem_effs": None}}]}, "serving.0.facts"),
    ],
)
def test_a_bad_file_is_one_clear_error(tmp_path, change, problem):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({**json.loads(builtin().model_dump_json()), **change}, default=str))
    with pytest.raises(PlanError, match="bad.json is no calibration: " + problem):
        load(str(path))


def test_a_file_that_is_not_json_is_one_clear_error(tmp_path):
    (tmp_path / "bad.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(PlanError, match="not UTF-8"):
        load("bad", tmp_path)
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(PlanError, match="Invalid JSON"):
        load("bad", tmp_path)


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({"mem_eff": fact(0.0)}, "mem_eff = 0.0 divides"),
        ({"step_s": fact(-1.0)}, "step_s = -1.0 must be"),
        ({"step_s": fact(float("nan"))}, "step_s = nan must be"),
        ({"serving": (serving("", "", float("inf")),)}, r"serving\[0\].mem_eff = inf"),
        ({"laws": (MeasuredLaw(model="m", chip="c", pause_s=fact(-2.0)),)}, r"laws\[0\].pause_s = -2.0"),
    ],
)
def test_impossible_numbers_are_refused(facts, problem):
    with pytest.raises(ValueError, match=problem):
        Constants(**facts)


def test_a_serving_set_of_an_unknown_constant_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="did you mean 'layer_s'"):
        ServingSet(chip="h100", facts={"layers_s": fact(1.0)})


def test_half_a_decode_law_is_refused():
    with pytest.raises(ValueError, match="together"):
        MeasuredLaw(model="m", chip="c", base_s=fact(1.0))


def test_the_closest_serving_set_is_applied():
    sets = (serving("sglang", "fp8", 0.6), serving("vllm", "fp8", 0.7), serving("", "", 0.5))
    c = Constants(serving=sets)
    assert c.for_serving("h100", "fp8", "vllm").mem_eff.value == 0.7
    assert c.for_serving("h100", "fp8").mem_eff.value == 0.6  # the first of several
    assert c.for_serving("h100", "fp8", "trtllm").mem_eff.value == 0.5
    assert c.for_serving("h100", "bf16", "vllm").mem_eff.value == 0.5
    assert c.for_serving("h200", "fp8", "vllm") is c


def test_the_last_law_of_the_asked_width_wins():
    laws = tuple(
        MeasuredLaw(model="m", chip="cpu", gen_tp=tp, train_gpus=n, publish_s=fact(s))
        for tp, n, s in [(1, 1, 0.1), (2, 2, 0.2), (2, 4, 0.3)]
    )
    c = Constants(laws=laws)
    assert c.law("m", "cpu") is laws[2]
    assert c.law("m", "cpu", gen_tp=1) is laws[0]
    assert c.law("m", "cpu", gen_tp=4) is None
    assert c.law("m", "cpu", train_gpus=2) is laws[1]
    assert c.law("m", "cpu", train_gpus=64) is laws[2]
    assert c.law("m", "h100") is None


def test_a_basis_is_as_good_as_its_weakest_constant_or_measured():
    law = MeasuredLaw(model="m", chip="cpu", train_s_per_tok=fact(1e-4, "measured"))
    c = Constants(name="mine", laws=(law,))
    basis = c.basis(model="m", gen_chip="h100", train_chip="cpu", precision="bf16")
    assert basis["training"] == ("mine", "measured")
    assert basis["decode"] == ("mine", "fitted")
    assert weakest([fact(1), fact(1, "guess"), fact(1, "measured")]) == "guess"
