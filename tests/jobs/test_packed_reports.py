"""Reports in a job's list take little memory and are what was put in."""

import gc
import json
import tracemalloc

import pytest
from pydantic import BaseModel, SerializeAsAny

import lowtide
from lowtide.jobs.packed_reports import PackedReports
from lowtide.jobs.report import DenoisedImageReport, DenoiseReport, UpscaleReport


class Wide(DenoisedImageReport):
    """A kind of item with a field that the type of the list does not have."""

    extra: float = 0.5


def reports(count) -> list[DenoisedImageReport]:
    return [
        Wide(input=f"{number}.png", output="out.png", status="done", width=number, notes=["a note"])
        for number in range(count)
    ]


def test_it_is_a_list_of_equal_reports():
    items = reports(5)
    packed = PackedReports(items)
    assert packed == items and list(packed) == items and packed[-1] == items[4]
    assert packed[1:3] == items[1:3] and packed.index(items[3]) == 3
    assert packed != items[:4] and packed != tuple(items)
    assert repr(packed) == repr(items)
    packed.insert(0, items[4])
    del packed[1:3]
    assert packed == [items[4], *items[2:]]
    assert all(type(one) is Wide for one in packed)


def test_a_changed_report_is_kept_once_it_is_assigned():
    packed = PackedReports(reports(2))
    image = packed[0]
    image.events.append("changed")
    assert packed[0].events == []
    packed[0] = image
    assert packed[0].events == ["changed"]


def test_it_is_a_list_in_files():
    """Fields that only the item's own class has are kept, as in a plain list."""

    class Plain(BaseModel):
        images: list[SerializeAsAny[DenoisedImageReport]]

    items = reports(3)
    report = DenoiseReport(images=PackedReports(items))
    as_list = Plain(images=items).model_dump(mode="json")["images"]
    assert report.model_dump(mode="json")["images"] == as_list
    assert json.loads(report.model_dump_json())["images"] == as_list
    assert DenoiseReport.model_validate(report.model_dump()).images[2].width == 2
    assert DenoiseReport().images == []


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_document_in_parts_is_that_of_the_whole_report(count):
    report = DenoiseReport(images=PackedReports(reports(count)), seconds=1.5)
    whole = json.loads(report.model_dump_json())
    assert json.loads("".join(report.json_parts())) == whole
    assert json.loads("".join(report.json_parts(error={"hint": "×"}))) == {
        **whole,
        "error": {"hint": "×"},
    }


def test_reports_of_many_images_take_little(tmp_path, save, crop):
    save(tmp_path / "in.png", crop)
    (image,) = lowtide.plan(tmp_path / "in.png", tmp_path / "out.png", budget="64MiB").images
    report = UpscaleReport()
    tracemalloc.start()
    for number in range(2000):
        report.images.append(image.model_copy(update={"input": f"{number}.png"}))
    gc.collect()  # pickling leaves some garbage
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    written = sum(map(len, report.json_parts()))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 2000 * 600
    assert peak - taken < written // 10
