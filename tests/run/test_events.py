"""Events as TensorBoard's own code reads them: every field, and the checksums of their frames."""
import ctypes
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.compat.proto import event_pb2
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from meshtrain.journal import events


def parsed(frame: bytes):
    (size,) = struct.unpack("<Q", frame[:8])
    assert len(frame) == size + 16 and struct.unpack("<I", frame[8:12]) == (masked_crc32c(frame[:8]),)
    assert struct.unpack("<I", frame[-4:]) == (masked_crc32c(frame[12:-4]),)
    return event_pb2.Event.FromString(frame[12:-4])


@given(st.integers(0, 2**62), st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=200), st.floats(), max_size=5))
def test_scalars_have_their_step_tags_and_values_in_float32(step, numbers):
    event = parsed(events.scalars(step, numbers))
    assert event.step == step and event.wall_time > 1e9
    found = {value.tag: value.simple_value for value in event.summary.value}
    assert found.keys() == numbers.keys()
    for tag, value in numbers.items():
        assert found[tag] == ctypes.c_float(value).value or math.isnan(found[tag]) and math.isnan(value)


@given(st.integers(0, 2**40), st.text(st.characters(codec="utf-8"), max_size=400))
def test_a_text_is_a_string_of_the_text_plugin(step, text):
    (value,) = parsed(events.text(step, "config", text)).summary.value
    assert value.metadata.plugin_data.plugin_name == "text" and value.tag == "config"
    assert value.tensor.string_val == [text.encode()] and [dim.size for dim in value.tensor.tensor_shape.dim] == [1]
    assert value.tensor.dtype == 7


@pytest.mark.parametrize("step", [0, 1, 128, 300, 10**9])
def test_a_start_drops_later_events_and_a_file_begins_with_its_version(step):
    event = parsed(events.start(step))
    assert event.step == step and event.session_log.status == event_pb2.SessionLog.START
    assert parsed(events.version()).file_version == "brain.Event:2"
