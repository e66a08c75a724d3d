"""Trace loaders: rows as published, errors with file and line."""

import json
import lzma

import pytest

from predictors.servegen import load_clients, sample
from predictors.traces import TraceError, load_trace

MOONCAKE = [
    {"timestamp": 3000, "input_length": 1200, "output_length": 7, "hash_ids": [0, 4, 9]},
    {"timestamp": 0, "input_length": 1100, "output_length": 50, "hash_ids": [0, 4, 5]},
    {"timestamp": 0, "input_length": 100, "output_length": 60, "hash_ids": [0]},
]
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:46.6805900,374,44
"""


def test_mooncake(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in MOONCAKE))
    first, other, second = load_trace(path)
    assert [o.arrival.arrival_s for o in (first, other, second)] == [0.0, 0.0, 3.0]
    assert (first.output_tokens, first.arrival.prompt_tokens) == (50, 1100)
    # turn numbers follow the file, whose rows are in order of time as published
    assert first.arrival.session == second.arrival.session is not None
    assert other.arrival.session is None
    assert first.arrival.template_key == second.arrival.template_key != other.arrival.template_key
    assert first.arrival.prompt_key != second.arrival.prompt_key
    assert first.arrival.max_tokens is None


def test_azure_plain_and_compressed(tmp_path):
    (tmp_path / "t.csv").write_text(AZURE)
    with lzma.open(tmp_path / "t.csv.xz", "wt") as file:
        file.write(AZURE)
    plain, packed = load_trace(tmp_path / "t.csv"), load_trace(tmp_path / "t.csv.xz")
    assert [(o.arrival.prompt_tokens, o.output_tokens) for o in plain] == [(374, 44), (396, 109)]
    assert [o.arrival.arrival_s for o in plain] == [o.arrival.arrival_s for o in packed]
    assert plain[1].arrival.arrival_s - plain[0].arrival.arrival_s == pytest.approx(4.314579, abs=1e-5)
    assert plain[0].arrival.session is None


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", AZURE + "2023-11-16 18:15:51.0,x,1\n", r"t\.csv:4: not an Azure"),
        ("t.csv", AZURE + "2023-11-16 18:15:51.0,5\n", r"t\.csv:4: not an Azure"),
        ("t.csv", AZURE + "2023-11-16 18:15:51.0,5,-1\n", r"t\.csv:4: .*>= 0"),
        ("t.csv", "a,b\n1,2\n", r"t\.csv:1: .*header lacks"),
        ("t.csv", "", r"t\.csv:1: "),
        ("t.csv", AZURE.splitlines()[0] + "\n", "no requests"),
        ("t.jsonl", json.dumps(MOONCAKE[0]) + "\n{", r"t\.jsonl:2: not a Mooncake"),
        ("t.jsonl", '{"timestamp": 1}', r"t\.jsonl:1: .*input_length"),
        (
            "t.jsonl",
            '{"timestamp": 1, "input_length": 1.5, "output_length": 1, "hash_ids": []}',
            r"t\.jsonl:1: .*whole",
        ),
        ("t.jsonl", "\n\n", "no requests"),
        ("t.txt", "x", "kind"),
    ],
)
def test_damage_names_file_and_line(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(TraceError, match=message):
        load_trace(tmp_path / name)


def test_missing_and_torn_files(tmp_path):
    with pytest.raises(TraceError, match="no such trace file"):
        load_trace(tmp_path / "none.csv")
    whole = lzma.compress((AZURE * 200).encode())
    (tmp_path / "t.csv.xz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match=r"damaged|not an Azure"):
        load_trace(tmp_path / "t.csv.xz")


def servegen(folder, rate="0.5", family="Gamma", output="{100: 0.5, 300: 0.5}"):
    rows = [f"{start},{rate},1.0,{family},1.0,2.0" for start in range(0, 86_400, 600)]
    (folder / "chunk-0-trace.csv").write_text("\n".join(rows) + "\n")
    lengths = {
        str(s): {"input_tokens": "{10: 1.0}", "output_tokens": output} for s in range(0, 86_400, 21_600)
    }
    lengths["43200"] = {"input_tokens": "{}", "output_tokens": "{}"}
    (folder / "chunk-0-dataset.json").write_text(json.dumps(lengths))
    return folder


@pytest.mark.parametrize("family", ["Gamma", "Weibull"])
def test_servegen_sample(tmp_path, family):
    clients = load_clients(servegen(tmp_path, family=family))
    made = sample(clients, 3_000, seed=1)
    assert len(made) == pytest.approx(3_000, rel=0.1)
    at = [o.arrival.arrival_s for o in made]
    assert at == sorted(at)
    assert {o.output_tokens for o in made} == {100, 300}
    assert {o.arrival.client for o in made} == {"chunk-0"}
    assert not [t for t in at if 43_200 <= t < 64_800]  # no lengths there, hence no requests
    assert made == sample(clients, 3_000, seed=1)
    assert made != sample(clients, 3_000, seed=2)


def test_servegen_damage(tmp_path):
    with pytest.raises(TraceError, match="holds no chunk"):
        load_clients(tmp_path)
    servegen(tmp_path, family="Pareto")
    with pytest.raises(TraceError, match=r"chunk-0-trace\.csv:1: .*Pareto"):
        load_clients(tmp_path)
    servegen(tmp_path, output="import os")
    with pytest.raises(TraceError, match="not a ServeGen length file"):
        load_clients(tmp_path)
    (tmp_path / "chunk-0-dataset.json").unlink()
    with pytest.raises(TraceError, match="is missing beside"):
        load_clients(tmp_path)
    (tmp_path / "x.tar.xz").write_bytes(b"no archive")
    with pytest.raises(TraceError, match="cannot read"):
        load_clients(tmp_path / "x.tar.xz")
