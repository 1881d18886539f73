"""W&B sees a copy of the run, never more than it may, and is never in the way."""

import sys

import pytest
import wandb
import yaml

from lfc.mirror import resolve_mode
from tests.crowds import write_crowd
from tests.test_cli import fit, metrics


def secret_crowd(folder):
    """A crowd whose annotators have ids that are found nowhere by chance."""
    crowd = write_crowd(folder)
    path = crowd / "annotations.csv"
    path.write_text(path.read_text().replace(",ann,", ",SECRET-ann,").replace(",bob,", ",SECRET-bob,"))
    return crowd


def mirrored(folder, *args):
    crowd = secret_crowd(folder / "zoo")
    fit(folder, f"--data.path={crowd}", "--run.wandb=offline", *args, config="labelme")
    return sorted((folder / "labelme").iterdir())[-1]


def offline(run):
    return list((run / "wandb").glob("offline-run-*"))


def everything(folder):
    return b"\n".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def hidden(tmp_path_factory):
    return mirrored(tmp_path_factory.mktemp("hidden"), "--seed_everything=7")


def test_an_offline_run_is_in_the_run_folder_with_its_settings(hidden):
    (mirror,) = offline(hidden)
    (log,) = mirror.glob("*.wandb")
    content = log.read_bytes()
    for key, value in {"head": '"SpeeLFC"', "dataset": '"zoo"', "seed": "7"}.items():
        assert key.encode() in content and value.encode() in content
    assert b"val/acc" in content and b"test/acc" in content and b"annotators/i_js" in content
    assert metrics(hidden)["seed"] == 7 and yaml.safe_load((hidden / "config.yaml").read_text())["seed_everything"] == 7


def test_the_annotators_own_ids_stay_at_home(hidden):
    assert b"SECRET-" in (hidden / "annotators.csv").read_bytes()
    found = everything(hidden / "wandb")
    assert b"annotator-00000" in found  # under pseudonyms they are there
    assert b"SECRET-" not in found


def test_the_annotators_own_ids_are_sent_where_that_is_asked_for(tmp_path):
    run = mirrored(tmp_path, "--run.reveal_annotators=true")
    found = everything(run / "wandb")
    assert b"SECRET-ann" in found and b"SECRET-bob" in found and b"annotator-00000" not in found


def test_two_runs_of_a_process_are_two_runs(tmp_path):
    first, second = mirrored(tmp_path), mirrored(tmp_path)
    assert first != second
    ids = {path.name for run in (first, second) for path in offline(run)}
    assert len(ids) == 2 and [len(offline(run)) for run in (first, second)] == [1, 1]


LOGIN = [(True, "online"), (False, "offline"), (None, "offline")]


@pytest.mark.parametrize(("option", "expected"), [("online", "online"), ("offline", "offline"), ("off", "off")])
@pytest.mark.parametrize("environment", ["online", "offline", "disabled"])
def test_the_option_comes_before_the_environment(option, environment, expected, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", environment)
    assert resolve_mode(option) == expected


@pytest.mark.parametrize(
    ("environment", "expected"),
    [("online", "online"), ("shared", "online"), ("offline", "offline"), ("dryrun", "offline"), ("disabled", "off")],
)
def test_the_environment_comes_before_the_login(environment, expected, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", environment)
    monkeypatch.setattr(wandb, "login", lambda **options: pytest.fail("asked"))
    assert resolve_mode("auto") == expected


@pytest.mark.parametrize(("logged_in", "expected"), LOGIN)
def test_the_login_decides_last_and_nothing_is_asked(logged_in, expected, monkeypatch):
    monkeypatch.delenv("WANDB_MODE")
    asked = []
    monkeypatch.setattr(wandb, "login", lambda **options: asked.append(options) or logged_in)
    assert resolve_mode("auto") == expected
    assert asked == [{"prompt": False, "verify": False}]


def test_a_broken_login_does_not_stop_a_training(monkeypatch):
    monkeypatch.delenv("WANDB_MODE")

    def broken(**options):
        raise ValueError("API key must be 40 characters long")

    monkeypatch.setattr(wandb, "login", broken)
    assert resolve_mode("auto") == "offline"


def test_off_imports_nothing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import of it fails
    fit(tmp_path, "--data.num_items=40", "--run.wandb=off")
    run = tmp_path / "quickstart" / "SpeeLFC-seed0"
    assert metrics(run) and not (run / "wandb").exists()


def test_out_of_reach_it_logs_offline_and_says_so(tmp_path, monkeypatch, caplog):
    init = wandb.init

    def unreachable(**options):
        if options["mode"] == "online":
            raise wandb.errors.CommError("run initialization has timed out")
        return init(**options)

    monkeypatch.setattr(wandb, "init", unreachable)
    with caplog.at_level("INFO"):
        fit(tmp_path, "--data.num_items=40", "--run.wandb=online")
    run = tmp_path / "quickstart" / "SpeeLFC-seed0"
    assert len(offline(run)) == 1 and metrics(run)
    assert "note: W&B cannot be reached (CommError); logging offline" in caplog.text
