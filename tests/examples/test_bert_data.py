"""BERT's data: text to records, records to batches, and errors."""

import numpy as np
import pytest

from examples.bert import text
from examples.bert.config import PRESETS
from examples.bert.data import Batches, Reader, open_sequences, unigram_accuracy
from examples.bert.make_records import main, read_documents
from examples.bert.pack_records import join, pack
from examples.bert.pack_records import main as pack_main
from examples.bert.sequences import encode_documents, make_sequences
from examples.bert.wordpiece import SPECIAL, Vocabulary
from examples.common.records import Records, find_shards, make_example, write_records
from ftmesh.errors import DataError

DOCUMENTS = text.synthetic_documents(60)
LINES = [line for document in DOCUMENTS for line in document]
WORDS = Vocabulary.from_words(LINES)
SIZES = {"length": 32, "predictions": 5}


def sequences(**changes):
    documents = encode_documents(DOCUMENTS, WORDS)
    settings = {**SIZES, "rng": np.random.default_rng(0), **changes}
    return list(make_sequences(documents, WORDS, **settings))


def features(**changes):
    """A valid record with some changes."""
    made = {
        "input_ids": [2, 7, 4, 3, 9, 3, 0, 0],
        "input_mask": [1, 1, 1, 1, 1, 1, 0, 0],
        "segment_ids": [0, 0, 0, 0, 1, 1, 0, 0],
        "masked_lm_positions": [2, 0],
        "masked_lm_ids": [8, 0],
        "masked_lm_weights": [1.0, 0.0],
        "next_sentence_labels": [1],
    }
    return {key: value for key, value in {**made, **changes}.items() if value is not None}


def opened(folder, split="train", **changes):
    settings = {"length": 8, "predictions": 2, "vocabulary": 10, "num_sequences": 20, **changes}
    return open_sequences(folder, split, **settings)


@pytest.fixture
def records(tmp_path):
    """Seven training sequences in two shards, numbered by their second token; three to validate."""
    for split, shards in (("train", [range(4), range(4, 7)]), ("validation", [range(3)])):
        for shard, numbers in enumerate(shards):
            made = [
                make_example(features(input_ids=[2, i, 4, 3, 9, 3, 0, 0], masked_lm_ids=[i, 0]))
                for i in numbers
            ]
            write_records(tmp_path / f"{split}-{shard:05}-of-{len(shards):05}", made)
    return tmp_path


class TestText:
    def test_a_few_hundred_kilobytes_of_few_words(self, tmp_path):
        path = tmp_path / "village.txt"
        assert text.main([str(path)]) == 0
        assert 300_000 < path.stat().st_size < 500_000
        documents = read_documents(path)
        assert documents == text.synthetic_documents()
        assert len(Vocabulary.from_words(line for document in documents for line in document)) < 200
        assert documents != text.synthetic_documents(seed=1)

    def test_usage(self, capsys):
        assert text.main([]) == 2
        assert "FILE" in capsys.readouterr().err


class TestVocabulary:
    def test_pieces(self, tmp_path):
        made = Vocabulary.train(LINES, 120)
        assert len(made) <= 120
        assert made == Vocabulary.train(LINES, 120)
        pieces = [made.pieces[number] for number in made.encode("Bakery")]
        assert "".join(piece.removeprefix("##") for piece in pieces) == "bakery"
        made.write(tmp_path / "vocab.txt")
        assert Vocabulary.read(tmp_path / "vocab.txt") == made

    def test_whole_words(self):
        assert WORDS.pieces[:5] == SPECIAL
        numbers = WORDS.encode("The baker !")
        assert numbers == [WORDS.number("the"), WORDS.number("baker"), WORDS.number("[UNK]")]

    def test_not_a_vocabulary(self, tmp_path):
        with pytest.raises(DataError, match=r"cannot read .*: No such file"):
            Vocabulary.read(tmp_path / "vocab.txt")
        (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\nthe\n")
        with pytest.raises(DataError, match=r"vocab.txt is not a vocabulary: .* lacks \[SEP\]"):
            Vocabulary.read(tmp_path / "vocab.txt")


class TestSequences:
    def test_masks(self):
        made = sequences()
        masked = kept = replaced = words = 0
        for each in made:
            ids, length = each["input_ids"], each["input_mask"].sum()
            number = int(each["masked_lm_weights"].sum())
            positions, targets = (
                each[key][:number] for key in ("masked_lm_positions", "masked_lm_ids")
            )
            assert 1 <= number <= 5
            assert (np.diff(positions) > 0).all()
            assert positions.max() < length - 1
            assert not np.isin(targets, [WORDS.number(piece) for piece in SPECIAL]).any()
            assert not ids[length:].any()
            masked += (ids[positions] == WORDS.number("[MASK]")).sum()
            kept += (ids[positions] == targets).sum()
            replaced += number
            words += length - 3
        assert masked / replaced == pytest.approx(0.8, abs=0.03)
        assert kept / replaced == pytest.approx(0.1, abs=0.03)
        assert replaced / words == pytest.approx(0.15, abs=0.02)

    def test_passages(self):
        made = sequences()
        start, between = WORDS.number("[CLS]"), WORDS.number("[SEP]")
        for each in made:
            length = each["input_mask"].sum()
            ids, segments = each["input_ids"][:length], each["segment_ids"][:length]
            first, second = np.flatnonzero(ids == between)
            assert ids[0] == start
            assert second == length - 1
            np.testing.assert_array_equal(segments, np.arange(length) > first)
        is_random = np.mean([each["next_sentence_labels"] for each in made])
        assert 0.45 < is_random < 0.65  # a passage of one sentence has none that follows

    def test_every_sentence_is_in_one(self):
        """If nothing is cut, the first passages and the following ones make up the text."""
        documents = [[[5], [6], [7], [8]], [[9], [10], [11]]]
        rng = np.random.default_rng(0)
        made = list(make_sequences(documents, WORDS, length=64, predictions=1, rng=rng))
        seen = []
        for each in made:
            ids = each["input_ids"].copy()
            ids[each["masked_lm_positions"]] = each["masked_lm_ids"]
            keep = (each["segment_ids"] == 0) | (each["next_sentence_labels"] == 0)
            seen += [int(i) for i in ids[keep] if i >= 5]
        assert seen == [5, 6, 7, 8, 9, 10, 11]

    def test_the_same_seed_gives_the_same_ones(self):
        for ours, theirs in zip(sequences(), sequences(), strict=True):
            assert ours.keys() == theirs.keys()
            for key in ours:
                np.testing.assert_array_equal(ours[key], theirs[key])


class TestMakeRecords:
    @pytest.fixture
    def village(self, tmp_path):
        path = tmp_path / "village.txt"
        path.write_text("\n\n".join("\n".join(document) for document in DOCUMENTS))
        return path

    def test_from_text_to_batches(self, tmp_path, village, capsys):
        out = tmp_path / "out"
        argv = [str(village), "--out", str(out), "--passes", "2", "--shards", "2"]
        assert main(argv) == 0
        said = capsys.readouterr().out
        assert "256 word pieces" in said
        assert len(Vocabulary.read(out / "vocab.txt")) == 256
        tiny = PRESETS["tiny"]
        sizes = {"length": tiny.length, "predictions": tiny.predictions}
        train, validation = (
            open_sequences(out, split, vocabulary=256, num_sequences=0, **sizes)
            for split in ("train", "validation")
        )
        assert f"{len(train)} sequences for training and {len(validation)} for validation" in said
        assert len(train) > 10 * len(validation)
        batch, _ = Batches(train, batch=4, num_steps=1, **sizes)[0]
        assert (batch.targets >= 0).any(axis=1).all()
        before = [Records(find_shards(out, "train-*"))[i] for i in range(3)]
        assert main([*argv, "--vocab", str(out / "vocab.txt")]) == 0
        assert before == [Records(find_shards(out, "train-*"))[i] for i in range(3)]

    @pytest.mark.parametrize(
        ("argv", "message", "status"),
        [
            (["nothing.txt"], "cannot read nothing.txt: No such file", 66),
            (["TEXT", "--every", "100"], "the text has 60 documents", 69),
            (["TEXT", "--vocab", "BIG"], "has 305 pieces; the preset tiny allows 256", 69),
            (["TEXT", "--vocab", "TEXT"], "is not a vocabulary", 69),
            (["LINE"], "line 2 of", 69),
            (["WORD"], "a word of more than 1000 characters", 69),
            (["/dev/zero"], "cannot read /dev/zero: it is not a file", 69),
            (["TEXT", "--shards", "2"], "already has train-00000-of-00004, and 2 shards", 69),
        ],
    )
    def test_bad_input_is_a_one_line_error(self, tmp_path, village, capsys, argv, message, status):
        big = tmp_path / "vocab.txt"
        Vocabulary((*SPECIAL, *map(str, range(300)))).write(big)
        line, word = tmp_path / "line.txt", tmp_path / "word.txt"
        line.write_text("a sentence\n" + "and on " * 1_500_000)
        word.write_text("a sentence\n" + "on" * 500_000)
        (tmp_path / "out").mkdir()
        if "--shards" in argv:
            write_records(tmp_path / "out" / "train-00000-of-00004", [])
        names = {"TEXT": str(village), "BIG": str(big), "LINE": str(line), "WORD": str(word)}
        argv = [names.get(word, word) for word in argv]
        assert main([*argv, "--out", str(tmp_path / "out")]) == status
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


class TestRecords:
    def test_a_batch(self, records):
        batch, damaged = Batches(opened(records, "validation"), length=8, predictions=2, batch=4)[0]
        np.testing.assert_array_equal(batch.tokens[:, 1], [0, 1, 2, 0])
        np.testing.assert_array_equal(batch.segments[1], [0, 0, 0, 0, 1, 1, 0, 0])
        np.testing.assert_array_equal(batch.lengths, [[6], [6], [6], [0]])
        np.testing.assert_array_equal(batch.positions[1], [2, 0])
        np.testing.assert_array_equal(batch.targets, [[0, -1], [1, -1], [2, -1], [-1, -1]])
        np.testing.assert_array_equal(batch.is_random, [[1], [1], [1], [-1]])
        assert (damaged == -1).all()

    def test_resumed_with_other_rows(self, records):
        settings = {"length": 8, "predictions": 2, "batch": 4, "num_steps": 6, "seed": 3}
        whole = Batches(opened(records), **settings)
        part = Batches(opened(records), rows=[2, 3, -1], **settings)
        with Reader(part, first_step=3) as reader:
            read = list(reader)
        assert len(read) == 3
        for step, batch in enumerate(read, 3):
            np.testing.assert_array_equal(batch.tokens[:2], whole[step][0].tokens[2:])
            assert batch.is_random[2] == -1
        stream = np.concatenate([whole[step][0].tokens[:, 1] for step in range(6)])[:21]
        for epoch in stream.reshape(3, 7):
            assert sorted(epoch) == list(range(7))

    def test_files_as_mlperf_names_them(self, records):
        (records / "train-00000-of-00002").rename(records / "part-00000-of-00002")
        (records / "train-00001-of-00002").rename(records / "part-00001-of-00002")
        (records / "validation-00000-of-00001").rename(records / "eval_10k")
        assert len(opened(records)) == 7
        assert len(opened(records, "validation")) == 3

    def test_a_damaged_record_is_left_out(self, records, caplog):
        path = records / "validation-00000-of-00001"
        raw = bytearray(path.read_bytes())
        raw[50] ^= 1
        path.write_bytes(bytes(raw))
        source = Batches(opened(records, "validation"), length=8, predictions=2, batch=3)
        with Reader(source) as reader:
            (batch,) = reader
        np.testing.assert_array_equal(batch.is_random, [[-1], [1], [1]])
        assert "record 0: the data does not match its checksum" in caplog.text

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"input_mask": None}, "has 0 numbers in input_mask, not 8"),
            ({"masked_lm_ids": [1]}, "has 1 numbers in masked_lm_ids, not 2"),
            ({"input_ids": [10] * 8}, "has 10 to 10 in input_ids; the model has 0 to 9"),
            ({"masked_lm_positions": [8, 0]}, "has 0 to 8 in masked_lm_positions"),
            ({"segment_ids": [2] * 8}, "has 2 to 2 in segment_ids"),
            ({"input_mask": [0, 1] * 4}, "has an input_mask that does not number its sequences"),
            ({"input_mask": [1] * 4 + [2] * 4}, "has an input_mask that does not number"),
            ({"next_sentence_labels": [1, 0]}, "has 2 sequences, not 1 to 1: give --packed 2"),
            ({"next_sentence_labels": None}, "has 0 sequences, not 1 to 1"),
        ],
    )
    def test_records_that_do_not_fit(self, tmp_path, changes, message):
        write_records(tmp_path / "train-00000-of-00001", [make_example(features(**changes))])
        with pytest.raises(DataError, match=f"record 0 {message}"):
            opened(tmp_path)

    def test_missing_data(self, tmp_path):
        with pytest.raises(DataError, match=r"no file in .* matches 'train-"):
            opened(tmp_path)
        with pytest.raises(DataError, match="there is no folder"):
            opened(tmp_path / "nowhere")
        write_records(tmp_path / "train-00000-of-00001", [])
        with pytest.raises(DataError, match="hold no records"):
            opened(tmp_path)


class TestPacking:
    def test_rows_are_filled_within_limits(self):
        rng = np.random.default_rng(0)
        lengths, predictions = rng.integers(3, 24, 500), rng.integers(1, 6, 500)
        rows = pack(lengths, predictions, length=32, most_predictions=7, most=3)
        assert sorted(i for row in rows for i in row) == list(range(500))
        assert max(lengths[row].sum() for row in rows) == 32
        assert max(predictions[row].sum() for row in rows) == 7
        assert {len(row) for row in rows} == {1, 2, 3}
        full = pack(lengths, 0 * predictions, length=32, most_predictions=7, most=8)
        assert len(full) == pytest.approx(lengths.sum() / 32, rel=0.03)
        assert pack(lengths, predictions, length=32, most_predictions=7, most=1) == [
            [i] for i in sorted(range(500), key=lambda i: -lengths[i])
        ]

    def test_a_row_of_two(self):
        short = {
            "input_ids": [2, 6, 3, 0, 0, 0, 0, 0],
            "input_mask": [1, 1, 1, 0, 0, 0, 0, 0],
            "segment_ids": [0, 0, 1, 0, 0, 0, 0, 0],
            "masked_lm_positions": [1, 0],
            "next_sentence_labels": [0],
        }
        first, second = (
            {key: np.array(value) for key, value in features(**short, **more).items()}
            for more in ({"masked_lm_ids": [7, 0]}, {"masked_lm_ids": [9, 0]})
        )
        row = join([first, {**second, "next_sentence_labels": np.array([1])}])
        assert {key: value.tolist() for key, value in row.items()} == {
            "input_ids": [2, 6, 3, 2, 6, 3, 0, 0],
            "input_mask": [1, 1, 1, 2, 2, 2, 0, 0],
            "segment_ids": [0, 0, 1, 0, 0, 1, 0, 0],
            "masked_lm_positions": [1, 4],
            "masked_lm_ids": [7, 9],
            "masked_lm_weights": [1.0, 1.0],
            "next_sentence_labels": [0, 1],
        }

    def test_from_records_to_batches(self, tmp_path, capsys):
        tiny, rows = PRESETS["tiny"], tmp_path / "rows"
        made = [make_example(each) for each in sequences()]
        for split in ("train", "validation"):
            write_records(tmp_path / f"{split}-00000-of-00001", made)
        assert pack_main([str(tmp_path), "--out", str(rows), "--most", "4"]) == 0
        said = capsys.readouterr().out
        sizes = {"length": tiny.length, "predictions": tiny.predictions}
        packed = open_sequences(rows, "train", vocabulary=256, num_sequences=0, packed=4, **sizes)
        assert f"{2 * len(made)} sequences in {2 * len(packed)} rows of 32 tokens" in said
        assert len(packed) < len(made)
        batch, _ = Batches(packed, batch=len(packed), packed=4, **sizes)[0]
        assert (batch.lengths > 0).sum() == (batch.is_random >= 0).sum() == len(made)
        assert (batch.lengths > 0).sum(1).max() > 1
        assert batch.lengths.sum(1).max() <= 32
        starts = np.cumsum(batch.lengths, axis=1) - batch.lengths
        places = np.nonzero(batch.lengths)
        assert (batch.tokens[places[0], starts[places]] == WORDS.number("[CLS]")).all()

    def test_not_where_the_records_are(self, records, capsys):
        assert pack_main([str(records), "--out", str(records)]) == 69
        assert "give another folder" in capsys.readouterr().err


def test_synthetic_sequences():
    settings = {**SIZES, "vocabulary": 256}
    train, again, validation = (
        opened(None, split, **settings) for split in ("train", "train", "validation")
    )
    assert len(train) == 20
    np.testing.assert_array_equal(train.read(7)["input_ids"], again.read(7)["input_ids"])
    assert (train.read(7)["input_ids"] != validation.read(7)["input_ids"]).any()
    assert train.name(7) == "synthetic sequence 7"
    with pytest.raises(DataError, match=r"synthetic text has \d+ words; the model has 99"):
        opened(None, **{**settings, "vocabulary": 99})


def test_the_unigram_baseline(tmp_path):
    def write(split, words):
        made = [make_example(features(masked_lm_ids=[word, 0])) for word in words]
        write_records(tmp_path / f"{split}-00000-of-00001", made)
        return opened(tmp_path, split)

    assert unigram_accuracy(write("train", [5, 5, 6]), write("validation", [5, 6, 6, 8])) == 0.25
    assert unigram_accuracy(write("train", [9]), write("validation", [5])) == 0.0
