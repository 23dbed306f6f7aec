"""CONTRIBUTING tells the truth about the house."""

import re
import sys
from pathlib import Path

import pytest

import lowtide
from lowtide.cli.main import main

ROOT = Path(__file__).parent.parent
PACKAGE = Path(lowtide.__file__).parent


def test_a_picture_lives_as_it_is_told(tmp_path, save, photo):
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    life = text.partition("### The life of one picture")[2].partition("\n## ")[0]
    told = re.findall(r"^\d+\. `([\w/]+\.py): ([\w.]+)`", life, re.MULTILINE)
    assert len(told) > 15
    source = save(tmp_path / "photo.jpg", photo[:48, :64])
    entered = dict.fromkeys([])

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            where = Path(code.co_filename).relative_to(PACKAGE).as_posix()
            entered.setdefault((where, code.co_qualname))

    sys.setprofile(note)
    try:
        with pytest.raises(SystemExit) as ended:
            main(["upscale", str(source), "-o", str(tmp_path / "large.png"), "--quiet"])
    finally:
        sys.setprofile(None)
    assert ended.value.code == 0
    assert [one for one in entered if one in told] == told
