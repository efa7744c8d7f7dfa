"""ResNet-50's data: crops, order of examples, and errors."""

import contextlib
import io
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from examples.common.records import make_example, write_records
from examples.resnet50.augment import centre_crop, random_crop
from examples.resnet50.bench_data import measure_decoding
from examples.resnet50.data import Batches, Reader
from examples.resnet50.images import open_images
from ftmesh.errors import DataError, RecordError

CLASSES = 5
RNG = np.random.default_rng(0)
COLOURS = [(250, 20, 20), (20, 250, 20), (20, 20, 250), (240, 240, 20), (20, 240, 240)]


def encoded(image, kind="JPEG", **settings):
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()


def jpeg(label, brightness=1.0):
    """A small JPEG in the colour of its class."""
    colour = tuple(int(c * brightness) for c in COLOURS[label])
    return encoded(Image.new("RGB", (40, 30), colour))


def gradient(width, height):
    """An image whose red grows to the right, and its green downwards."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([x, y, 0 * x], axis=-1).astype(np.uint8))


def example(label, **changes):
    features = {"image/encoded": [jpeg(label)], "image/class/label": [label + 1]}
    return make_example(features | changes)


@pytest.fixture
def records(tmp_path):
    """A folder with 23 training images in three shards, and 7 validation images in one."""
    labels = np.arange(23) % CLASSES
    for shard in range(3):
        mine = [example(label) for label in labels[shard::3]]
        write_records(tmp_path / f"train-{shard:05}-of-00003", mine)
    mine = [example(label) for label in labels[:7]]
    write_records(tmp_path / "validation-00000-of-00001", mine)
    return tmp_path


@pytest.fixture
def folders(tmp_path):
    """The same images as files, one folder per class."""
    for split, number in (("train", 23), ("val", 7)):
        for index in range(number):
            label = index % CLASSES
            path = tmp_path / split / f"class-{label}" / f"{index}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(jpeg(label))
    return tmp_path


def opened(folder, split="train", num_classes=CLASSES):
    return open_images(folder, split, size=24, num_classes=num_classes, num_images=64)


def assert_colours(batch):
    """Every row has the colour of its label, up to JPEG's losses."""
    seen = batch.labels >= 0
    middle = batch.images[seen].mean(axis=(1, 2))
    np.testing.assert_allclose(middle, np.array(COLOURS)[batch.labels[seen]], atol=6)


class TestAugmentation:
    def test_a_random_crop_is_a_part_of_the_image(self):
        data, rng = encoded(gradient(400, 300), quality=95), np.random.default_rng(0)
        areas, mirrored = [], 0
        for _ in range(200):
            crop = random_crop(data, 16, rng).astype(float)
            assert crop.shape == (16, 16, 3)
            width = abs(crop[:, -1, 0].mean() - crop[:, 0, 0].mean()) / 255 * 16 / 15
            height = (crop[-1, :, 1].mean() - crop[0, :, 1].mean()) / 255 * 16 / 15
            assert 0.7 < width * 400 / (height * 300) < 1.43  # 3/4 to 4/3, and rounding
            areas.append(width * height)
            mirrored += crop[0, 0, 0] > crop[0, -1, 0]
        assert 0.06 < min(areas) < 0.15
        assert 0.75 < max(areas) < 1.05
        assert 0.38 < np.mean(areas) < 0.48  # uniform from 0.08 to 1, less what does not fit: 0.43
        assert 70 < mirrored < 130

    def test_the_same_seed_gives_the_same_crop(self):
        data = encoded(gradient(400, 300))
        first, second = (random_crop(data, 16, np.random.default_rng(7)) for _ in range(2))
        np.testing.assert_array_equal(first, second)

    @pytest.mark.parametrize("shape", [(400, 300), (300, 400), (1, 300), (2000, 3)])
    def test_any_shape_gives_a_square(self, shape):
        data = encoded(gradient(*shape))
        assert random_crop(data, 16, np.random.default_rng(0)).shape == (16, 16, 3)
        assert centre_crop(data, 16).shape == (16, 16, 3)

    def test_centre_crop(self):
        image = gradient(512, 384)
        plain = image.resize((341, 256), Image.Resampling.BILINEAR)
        plain = np.asarray(plain.crop((58, 16, 282, 240)), int)
        # One pixel is half a grey level; JPEG and the fraction of a pixel in 341 cost a few.
        assert np.abs(centre_crop(encoded(image, quality=95), 224) - plain).max() <= 6

    def test_a_large_jpeg_is_decoded_at_a_smaller_scale(self, monkeypatch):
        sizes = []
        load = Image.Image.resize

        def resize(self, *args):
            sizes.append(self.size)
            return load(self, *args)

        monkeypatch.setattr(Image.Image, "resize", resize)
        image = gradient(2000, 1500)
        crops = [centre_crop(encoded(image, kind), 224) for kind in ("JPEG", "PNG")]
        assert sizes == [(500, 375), (2000, 1500)]
        assert np.abs(crops[0].astype(int) - crops[1]).max() <= 6

    @pytest.mark.parametrize(("mode", "kind"), [("L", "JPEG"), ("CMYK", "JPEG"), ("P", "PNG")])
    def test_all_modes_become_rgb(self, mode, kind):
        data = encoded(Image.new("RGB", (30, 30), (90, 90, 90)).convert(mode), kind)
        np.testing.assert_allclose(centre_crop(data, 8), 90, atol=4)

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda data: data[:-200], "does not decode.*truncated"),
            (lambda data: b"", "not an image"),
            (lambda data: b"GIF?" + data, "not an image"),
        ],
    )
    def test_a_damaged_image(self, damage, message):
        with pytest.raises(RecordError, match=message):
            centre_crop(damage(encoded(gradient(400, 300))), 16)


class TestImages:
    @pytest.mark.parametrize("kind", ["records", "folders"])
    def test_labels_count_from_zero(self, kind, request):
        folder = request.getfixturevalue(kind)
        for split, number in (("train", 23), ("validation", 7)):
            images = opened(folder, split)
            labels = [images.read(index)[1] for index in range(len(images))]
            assert sorted(labels) == sorted(np.arange(number) % CLASSES)

    def test_a_missing_shard(self, records):
        (records / "train-00001-of-00003").unlink()
        with pytest.raises(DataError, match="lacks 1 of 00003 shards: train-00001-of-00003"):
            opened(records)

    def test_a_label_out_of_range(self, records):
        with pytest.raises(DataError, match="has the label 3; labels of 2 classes go from 1 to 2"):
            opened(records, num_classes=2)
        path = records / "validation-00000-of-00001"
        write_records(path, [example(0), example(0, **{"image/class/label": [0]})])
        with pytest.raises(DataError, match=r"record 1 has the label 0; labels of 5 .* 1 to 5"):
            Batches(opened(records, "validation"), size=8, batch=2)[0]

    @pytest.mark.parametrize(
        ("record", "message"),
        [
            (make_example({"jpeg": [b"x"]}), "must have one image/encoded .* it has jpeg"),
            (make_example({}), "it has no features"),
            (example(0, **{"image/class/label": [1, 2]}), "must have one"),
        ],
    )
    def test_records_that_do_not_fit(self, records, record, message):
        write_records(records / "train-00000-of-00003", [record])
        with pytest.raises(DataError, match=message):
            opened(records)

    def test_no_records(self, tmp_path):
        write_records(tmp_path / "train-00000-of-00001", [])
        with pytest.raises(DataError, match="hold no records"):
            opened(tmp_path)

    def test_missing_data(self, tmp_path):
        with pytest.raises(DataError, match=r"no file in .* matches"):
            opened(tmp_path)
        with pytest.raises(DataError, match="there is no folder"):
            opened(tmp_path / "nowhere")

    def test_folders_that_do_not_fit(self, folders):
        with pytest.raises(DataError, match=r"has 5 folders, one per class; .* only 4 classes"):
            opened(folders, num_classes=4)
        (folders / "val" / "another").mkdir()
        with pytest.raises(DataError, match=r"has classes missing from .*train: another"):
            opened(folders, "validation")

    def test_folders_without_images(self, tmp_path):
        (tmp_path / "train" / "class").mkdir(parents=True)
        with pytest.raises(DataError, match="hold no images"):
            opened(tmp_path)
        with pytest.raises(DataError, match=r"there is no folder .*val"):
            opened(tmp_path, "validation")

    def test_made_up(self):
        train, again, validation = opened(None), opened(None), opened(None, "validation")
        assert len(train) == 64
        pixels, label = train.read(3)
        assert pixels.shape == (24, 24, 3)
        assert label in range(CLASSES)
        np.testing.assert_array_equal(pixels, again.read(3)[0])
        assert (pixels != validation.read(3)[0]).any()


class TestBatches:
    def labels(self, images, steps, **settings):
        batches = Batches(images, size=8, num_steps=len(steps), **settings)
        return np.concatenate([batches[step][0].labels for step in steps])

    def test_every_epoch_has_each_image_once_in_a_new_order(self, records):
        images = opened(records)
        stream = self.labels(images, range(23), batch=5)  # 115 images: five epochs
        epochs = stream.reshape(5, 23)
        for epoch in epochs:
            assert sorted(epoch) == sorted(np.arange(23) % CLASSES)
        assert len({tuple(epoch) for epoch in epochs}) == 5

    def test_the_order_depends_on_the_seed_not_on_the_batch_size(self, records):
        images = opened(records)
        by_5 = self.labels(images, range(12), batch=5)
        np.testing.assert_array_equal(by_5, self.labels(images, range(5), batch=12))
        assert (by_5 != self.labels(images, range(12), batch=5, seed=1)).any()

    @pytest.mark.parametrize("num_steps", [9, None])
    def test_processes_read_their_rows_of_the_same_batch(self, records, num_steps):
        def batch(rows):
            images = opened(records)
            return Batches(images, size=8, batch=6, num_steps=num_steps, rows=rows)[3][0]

        whole, parts = batch(None), [batch([0, 1, 2]), batch([3, 4, -1, 5])]
        np.testing.assert_array_equal(whole.images[:3], parts[0].images)
        np.testing.assert_array_equal(whole.labels[[3, 4, 5]], parts[1].labels[[0, 1, 3]])
        assert parts[1].labels[2] == -1
        assert not parts[1].images[2].any()

    def test_augmentation_differs_between_epochs(self, folders):
        (folders / "train" / "class-0" / "0.jpg").write_bytes(encoded(gradient(80, 60)))
        batches = Batches(opened(folders), size=8, batch=23, num_steps=2)
        seen = []
        for step in range(2):
            images, _ = batches[step][0]
            (row,) = np.flatnonzero(images.std(axis=(1, 2)).max(axis=1) > 8)
            seen.append(images[row])
        assert (seen[0] != seen[1]).any()

    def test_evaluation_sees_each_image_once(self, records):
        batches = Batches(opened(records, "validation"), size=8, batch=4)
        assert len(batches) == 2
        (first, _), (second, _) = batches[0], batches[1]
        np.testing.assert_array_equal(first.labels, [0, 1, 2, 3])
        np.testing.assert_array_equal(second.labels, [4, 0, 1, -1])
        assert_colours(first)
        assert_colours(second)
        assert not second.images[3].any()


class TestReader:
    @pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
    def test_resumed(self, records, workers):
        batches = Batches(opened(records), size=8, batch=6, num_steps=9)
        with Reader(batches, first_step=5, num_threads=2, num_workers=workers) as reader:
            read = list(reader)
        assert len(read) == 4
        for step, batch in enumerate(read, 5):
            expected, _ = batches[step]
            np.testing.assert_array_equal(batch.images, expected.images)
            np.testing.assert_array_equal(batch.labels, expected.labels)
            assert_colours(batch)

    @pytest.fixture
    def damaged(self, records):
        """Records 1 and 3 of the validation shard are damaged: a bit, and the end of a JPEG."""
        whole = [example(label) for label in range(CLASSES)]
        cut = jpeg(3)[:-20]
        whole[3] = example(3, **{"image/encoded": [cut]})
        path = records / "validation-00000-of-00001"
        write_records(path, whole)
        raw = bytearray(path.read_bytes())
        raw[16 + len(whole[0]) + 12 + 100] ^= 1
        path.write_bytes(bytes(raw))
        return Batches(opened(records, "validation"), size=8, batch=3)

    def test_damaged_records_are_left_out_and_counted(self, damaged, caplog):
        with Reader(damaged) as reader:
            first, second = reader
        np.testing.assert_array_equal(first.labels, [0, -1, 2])
        np.testing.assert_array_equal(second.labels, [-1, 4, -1])
        assert_colours(first)
        assert list(reader.skipped) == [1, 3]
        assert "record 1: the data does not match its checksum" in reader.skipped[1]
        assert "record 3: the image does not decode" in reader.skipped[3]
        assert caplog.text.count("left out") == 2

    def test_too_many_damaged_records(self, damaged):
        with Reader(damaged, max_skipped=1) as reader:
            next(reader)
            with pytest.raises(DataError, match=r"2 images are damaged, and at most 1 .* record 3"):
                next(reader)

    def test_a_damaged_record_is_counted_once(self, records):
        raw = bytearray((records / "train-00000-of-00003").read_bytes())
        raw[100] ^= 1
        (records / "train-00000-of-00003").write_bytes(bytes(raw))
        with Reader(Batches(opened(records), size=8, batch=23, num_steps=3), max_skipped=1) as read:
            assert [int((batch.labels == -1).sum()) for batch in read] == [1, 1, 1]
            assert len(read.skipped) == 1

    def test_a_wrong_label_is_an_error(self, records):
        path = records / "validation-00000-of-00001"
        write_records(path, [example(0), example(0, **{"image/class/label": [9]})])
        batches = Batches(opened(records, "validation"), size=8, batch=2)
        with Reader(batches) as reader, pytest.raises(DataError, match="has the label 9"):
            next(reader)


def test_decoding_rates(records):
    rates = measure_decoding(str(records), size=16, seconds=0.05, num_classes=CLASSES)
    assert rates.train > 0
    assert rates.evaluation > 0


def png(width, height):
    """A PNG of a hundred bytes whose header claims this size."""
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    parts = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize(
    "size", [(30_000, 30_000), (9_000, 9_000), (2**31 - 1, 1), (10_000, 9_500)]
)
def test_an_image_that_is_too_large_counts_as_damaged(size):
    for crop in (lambda data: centre_crop(data, 8), lambda data: random_crop(data, 8, RNG)):
        with pytest.raises(RecordError, match=r"an image of|not an image that Pillow can read"):
            crop(png(*size))


def test_damaged_images_raise_record_errors_only():
    """Whatever Pillow raises."""
    for kind in ("PNG", "JPEG", "BMP", "WEBP"):
        whole = encoded(gradient(20, 16), kind)
        for _ in range(150):
            raw = bytearray(whole)
            for at in RNG.integers(0, min(len(raw), 200), 3):
                raw[at] = RNG.integers(256)
            with contextlib.suppress(RecordError), warnings.catch_warnings(action="ignore"):
                assert centre_crop(bytes(raw), 8).shape == (8, 8, 3)
