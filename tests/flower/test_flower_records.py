import numpy as np
import pytest

flwr_app = pytest.importorskip("flwr.app")


def test_records_are_equal_after_packing_and_unpacking():
    from raysim.flower.records import pack_records, unpack_records

    content = flwr_app.RecordDict(
        {
            "z": flwr_app.MetricRecord({"loss": 0.5, "steps": 3, "all": [1, 2]}),
            "arrays": flwr_app.ArrayRecord(
                {"w": flwr_app.Array(np.arange(6, dtype=np.float64).reshape(2, 3))}
            ),
            "a": flwr_app.ConfigRecord(
                {"text": "ü", "data": b"\x00\xff", "parts": [b"a", b""], "on": True, "n": 1}
            ),
        }
    )
    unpacked = unpack_records(pack_records(content))
    assert list(unpacked) == ["z", "arrays", "a"]
    assert dict(unpacked["z"]) == dict(content["z"])
    assert dict(unpacked["a"]) == dict(content["a"])
    array = unpacked["arrays"]["w"].numpy()
    assert array.dtype == np.float64
    assert np.array_equal(array, np.arange(6).reshape(2, 3))


def test_empty_records_are_equal_after_packing_and_unpacking():
    from raysim.flower.records import pack_records, unpack_records

    content = flwr_app.RecordDict({"arrays": flwr_app.ArrayRecord()})
    assert list(unpack_records(pack_records(content))) == ["arrays"]
    assert len(unpack_records(pack_records(flwr_app.RecordDict()))) == 0


def test_size_of_flower_arrays_in_bytes_excludes_their_headers():
    from raysim.flower.records import count_array_bytes

    arrays = flwr_app.ArrayRecord({"w": flwr_app.Array(np.zeros((2, 3), np.float32))})
    assert count_array_bytes(flwr_app.RecordDict({"arrays": arrays})) == 24
