"""The benchmark of record indexes, on a few records."""

import time

import pytest

from examples.bert.bench_records import BATCH, measure_records, measure_start, random_records
from examples.common.records import write_records
from tests.support.more import more


def test_a_start(tmp_path):
    write_records(tmp_path / "train-00000-of-00001", random_records(2000, varied=True))
    began = time.time()
    figures = measure_start(tmp_path, began - 10)
    assert 10 < figures["from_start_s"] < 10 + time.time() - began
    assert 0 < figures["first_batch_s"] < figures["from_imports_s"] < figures["from_start_s"]


def test_records_are_of_one_length_or_varied():
    assert {len(record) for record in random_records(100, varied=False)} == {100}
    assert {len(record) for record in random_records(100, varied=True)} == set(range(80, 101))


@more
@pytest.mark.slow
def test_all_figures(tmp_path):
    figures = measure_records(tmp_path, 3 * BATCH)
    assert figures.records == 3 * BATCH
    assert 0.098 < figures.index_file_mb < 0.12  # 4 bytes each, and what is known of 8 files
    assert figures.load_s > 0
