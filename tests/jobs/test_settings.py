"""Settings of all jobs: their fields are the keywords of the calls, with help and defaults."""

import importlib
import inspect
import json
import pkgutil
from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

import lowtide
import lowtide.jobs
from lowtide.jobs.denoise.calibration.command import train_noise
from lowtide.jobs.engine.settings import JobSettings, json_schema, settings_fields
from lowtide.jobs.export.command import export_onnx
from lowtide.jobs.train.plan import plan_training
from lowtide.jobs.upscale.settings import UpscaleSettings
from lowtide.jobs.vae.command import decode, encode, roundtrip
from lowtide.jobs.vae.plan import plan_vae


def all_settings() -> list[type[JobSettings]]:
    """The settings classes of every job."""
    for module in pkgutil.walk_packages(lowtide.jobs.__path__, "lowtide.jobs."):
        if module.name.endswith(".settings"):
            importlib.import_module(module.name)
    found, classes = [JobSettings], []
    while found:
        below = found.pop().__subclasses__()
        found += below
        classes += [one for one in below if one.__module__.startswith("lowtide.jobs.")]
    return sorted(set(classes), key=lambda one: one.__qualname__)


CALLS = [
    lowtide.upscale,
    lowtide.plan,
    lowtide.video,
    lowtide.denoise,
    lowtide.forecast,
    lowtide.backtest,
    export_onnx,
    train_noise,
    plan_training,
    encode,
    decode,
    roundtrip,
    plan_vae,
]


def kinds(hint: Any) -> set[Any]:
    """What a type takes: types, and the words of a choice; lists and tuples are sequences."""
    origin = get_origin(hint)
    if origin is Annotated:
        return kinds(get_args(hint)[0])
    if origin in (Union, UnionType):
        return set().union(*map(kinds, get_args(hint)))
    if origin is Literal:
        return set(get_args(hint))
    return {Sequence if origin in (tuple, list, Sequence) else hint}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_keywords_of_a_call_are_the_fields_of_its_settings(call):
    settings, keywords = call.keywords_of
    known, typed = settings_fields(settings), get_type_hints(keywords)
    shown = inspect.signature(call).parameters
    assert "settings" not in shown
    assert known.keys() <= shown.keys()
    assert typed.keys() <= known.keys()
    for name, hint in typed.items():
        assert shown[name].default == known[name].default, name
        assert kinds(known[name].type) <= kinds(hint), name
        assert Path not in kinds(known[name].type) or str in kinds(hint), name


@pytest.mark.parametrize("settings", all_settings(), ids=lambda one: one.__qualname__)
def test_every_field_says_what_it_is(settings):
    for name, field in settings_fields(settings).items():
        assert field.help.endswith((".", "...")), name
        assert field.option.panel, name


@pytest.mark.parametrize("settings", all_settings(), ids=lambda one: one.__qualname__)
def test_the_schema_of_a_form_has_every_field(settings):
    schema = json.loads(json.dumps(json_schema(settings)))
    fields = settings_fields(settings)
    assert schema["properties"].keys() == fields.keys()
    required = {name for name, one in fields.items() if one.default is inspect.Parameter.empty}
    assert set(schema.get("required", ())) == required
    for name, shown in schema["properties"].items():
        assert (shown["description"], shown["panel"]) == (
            fields[name].help,
            fields[name].option.panel,
        )
        assert shown["option"].startswith("--")
        assert {"type", "anyOf", "enum", "$ref"} & shown.keys(), name


def test_what_a_form_returns_are_keywords():
    shown = json_schema(UpscaleSettings)["properties"]
    assert UpscaleSettings.of(**{name: one["default"] for name, one in shown.items()}) == (
        UpscaleSettings.of()
    )
    assert (shown["streams"]["minimum"], shown["streams"]["maximum"]) == (1, 16)
    assert shown["strategy"]["enum"] == ["auto", "whole", "streamed", "tiled"]
