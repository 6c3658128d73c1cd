"""What is wrong with the messages of a case, in words: verbs, number, bytes, and whether they were waited for."""

from collections.abc import Sequence

from shardlab.course.exercises.exercise import Done, Message, Traffic
from shardlab.course.exercises.values import told_apart


def wrong_traffic(traffic: Traffic, done: Sequence[Done]) -> str:
    """What is wrong with the messages of a case, in words; empty if nothing is."""
    for rank, of_rank in enumerate(done):
        if words := _wrong_on(rank, of_rank, traffic):
            return words
    total = sum(message.sent_bytes for of_rank in done for message in of_rank.messages)
    if total < traffic.least_bytes:
        sent, needed = told_apart(total, traffic.least_bytes)
        return (
            f"all ranks together sent {sent} B, and {needed} B are needed: "
            "send all of it, in its own dtype, through the communicator that your function gets"
        )
    return _not_waited_for(done)


def _not_waited_for(done: Sequence[Done]) -> str:
    """Last: the result was right all the same, this time."""
    for rank, of_rank in enumerate(done):
        for number, message in enumerate(of_rank.messages):
            if not message.is_waited_for:
                return (
                    f"rank {rank} never waited for message {number}, {_words(message)}; until then the tensor may "
                    "still be read or written, so the result was right by chance"
                )
    return ""


def _wrong_on(rank: int, done: Done, traffic: Traffic) -> str:
    """A verb that is not allowed, else too many messages, else too many bytes."""
    for number, message in enumerate(done.messages):
        if message.op not in traffic.ops:
            allowed = " and ".join(traffic.ops) or "no message"
            return f"rank {rank}, message {number} is {_words(message)}; allowed: {allowed}"
    sent, most = [message for message in done.messages if message.is_sent], traffic.most_messages
    if len(sent) > most:
        return (
            f"rank {rank} sent {len(sent)} messages where {most} {'is' if most == 1 else 'are'} enough; "
            f"message {done.messages.index(sent[most])} is the first too many: {_words(sent[most])}"
        )
    total = sum(message.sent_bytes for message in sent)
    if total <= traffic.most_bytes:
        return ""
    largest = max((message.num_bytes for messages in traffic.wanted for message in messages), default=0)
    first = next((message for message in sent if message.num_bytes > largest), sent[-1])
    bytes_sent, enough = told_apart(total, traffic.most_bytes)
    return (
        f"rank {rank} sent {bytes_sent} B where {enough} B are enough; "
        f"message {done.messages.index(first)} is {_words(first)}, and {largest} B is the largest needed"
    )


def _words(message: Message) -> str:
    place = f" (at {message.line})" if message.line else ""
    axis = f" over {message.axis}" if message.axis else ""
    return f"{message.op} of {message.num_bytes} B{axis}{place}"
