"""Messages: what is accepted, what is refused and by which field, and that both encodings say the same."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ErrorBody, InvalidField
from pipeline.protocol import messages
from pipeline.protocol.messages import Claim, Done, Failed, From, Go, Tokens, Usage, Whole
from pipeline.protocol.pieces import Choice, Extra

USAGE = Usage(
    prompt_tokens=3,
    completion_tokens=2,
    cached_tokens=0,
    decode_cached_tokens=0,
    prefill_generated_tokens=1,
    prefill="prefill-1",
    decode="decode-1",
)


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_token_ids_survive_packing(ids: list[int]) -> None:
    assert messages.unpack_ids(messages.pack_ids(ids)) == ids


def test_packed_ids_are_little_endian() -> None:
    assert messages.pack_ids([1, 258]) == b"\x01\x00\x00\x00\x02\x01\x00\x00"


@pytest.mark.parametrize(
    "frame",
    [
        Tokens(1, "r", "c", 4, messages.pack_ids([7, 8]), " hi"),
        Done(1, "r", "c", 2, messages.pack_ids([7, 8]), " hi", "stop", USAGE),
        Tokens(1, "r", "c", 4, messages.pack_ids([7, 8]), " hi", Extra(1, '{"token":"a"}', 3, messages.pack_ids([5]))),
        Done(
            1,
            "r",
            "c",
            2,
            messages.pack_ids([7, 8]),
            " hi",
            "stop",
            USAGE,
            [Choice(messages.pack_ids([7, 8]), " hi", "stop", ".", '{"token":"a"},{"token":"b"}')],
        ),
        Failed(1, "r", "c", 2, ErrorBody(message="m", type="t", code="c", status=500)),
    ],
)
def test_a_frame_reads_the_same_in_both_encodings(frame: messages.AnyFrame) -> None:
    assert messages.frames_decoder.decode(messages.frame_for(frame, "msgpack")) == [frame]
    spelled = msgspec.json.decode(messages.frame_for(frame, "json"))
    assert (spelled["request"], spelled["claim"], spelled["index"]) == ("r", "c", frame.index)
    if isinstance(frame, Failed):
        assert spelled["kind"] == "error"
        assert spelled["error"]["message"] == "m"
    else:
        assert spelled["ids"] == [7, 8]
        assert spelled["text"] == " hi"


def test_what_frames_carry_beyond_text_is_spelled_out_in_json() -> None:
    extra = Extra(1, '{"token":"a"}', 3, messages.pack_ids([5]))
    said = msgspec.json.decode(messages.frame_for(Tokens(1, "r", "c", 0, b"", "x", extra), "json"))
    assert said["extra"] == {
        "choice": 1,
        "logprobs": [{"token": "a"}],
        "prompt_tokens": 3,
        "prompt": [5],
        "message": [],
    }
    choice = Choice(messages.pack_ids([7]), "x", "stop", 7, "", '{"content":"x"}')
    done = Done(1, "r", "c", 1, b"", "x", "stop", USAGE, [choice], messages.pack_ids([5]))
    said = msgspec.json.decode(messages.frame_for(done, "json"))
    assert said["prompt"] == [5]
    plain = {"ids": [7], "text": "x", "finish_reason": "stop", "stop_reason": 7}
    assert said["choices"] == [plain | {"logprobs": [], "message": [{"content": "x"}]}]


def test_a_reader_that_knows_no_extras_reads_the_rest() -> None:
    class Old(messages.Frame, frozen=True, array_like=True, tag_field="kind", tag="tokens"):
        ids: bytes
        text: str

    frame = Tokens(1, "r", "c", 0, messages.pack_ids([7]), "x", Extra(1))
    assert msgspec.msgpack.decode(messages.encode(frame), type=Old).text == "x"
    old = msgspec.msgpack.encode(Old(1, "r", "c", 0, messages.pack_ids([7]), "x"))
    assert msgspec.msgpack.decode(old, type=Tokens) == Tokens(1, "r", "c", 0, messages.pack_ids([7]), "x")


def test_frames_of_several_requests_travel_as_one_message() -> None:
    frames = [Tokens(1, request, "c", 0, b"", "x") for request in ("a", "b")]
    assert messages.frames_decoder.decode(messages.encode(frames)) == frames


def test_a_claim_and_its_answer_are_written_as_the_request_was() -> None:
    claim = Claim(request="r", claim="c", epoch="e", holder="holder.p", ack="$JS.ACK.x", follows=None)
    assert messages.claim_decoder.decode(messages.claim_for(claim, "msgpack")) == claim
    assert msgspec.json.decode(messages.claim_for(claim, "json"))["type"] == "claim"
    assert messages.read_answer(messages.encode(Go(messages.pack_ids([5])))) == Go(messages.pack_ids([5]))
    assert messages.read_answer(b'{"type":"go","ids":[5]}') == Go(messages.pack_ids([5]))
    assert messages.read_answer(b'{"type":"go","persona":7}') == Go(persona=7)
    assert messages.read_answer(b'{"type":"whole"}') == Whole()
    assert messages.read_answer(b'{"type":"from","index":3}') == From(3)


@pytest.mark.parametrize("payload", [b"", b"{}", b'{"type":"maybe"}', b"\x81\xa4type\xa5maybe"])
def test_what_is_no_answer_is_refused(payload: bytes) -> None:
    with pytest.raises(InvalidField):
        messages.read_answer(payload)
