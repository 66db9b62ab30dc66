"""Real English text for the demo: the prose of Python's language reference, and the instructions of an assistant with questions to it."""

from __future__ import annotations

from collections.abc import Iterator

# Pages that are mostly prose, and about different things; the others follow.
_FIRST = ("execmodel", "objects", "import", "debugger", "formatstrings", "typesseq")
_LEAST_WORDS = 12

SYSTEM_PROMPT = """\
You are the assistant of the public library of a small town. You answer questions of visitors at the information desk and on the \
library's web page. Be friendly and brief: one or two short sentences are nearly always enough. Use plain words, answer in the language \
of the question, and never make up a fact. If the answer is not in this text, say that you do not know and send the visitor to the \
information desk on the ground floor.

Opening hours. The library is open from Tuesday to Friday from ten in the morning until seven in the evening, and on Saturday from ten \
until four. It is closed on Sunday, on Monday and on public holidays. The return box next to the main entrance can be used at any time. \
During the summer holidays the library closes at five.

Membership. Everyone who lives, works or studies in the town can become a member. A card for adults costs twenty euros a year; children, \
students and people without work pay nothing. To get a card, bring a passport or identity card and something that shows your address. \
Children under fourteen need the signature of a parent. A lost card is replaced for three euros.

Borrowing. Members may have up to fifteen items at a time. Books are lent for four weeks, magazines and films for one week, and games for \
two weeks. Loans can be renewed twice, on the web page, by telephone or at the desk, unless another visitor is waiting for the item. Items \
that stand on the red shelf are for reading in the building only. A reservation costs nothing; we keep a reserved item for seven days and \
write an email when it has arrived.

Late returns. For each week that an item is late we charge fifty cents, and never more than five euros for one item. Children pay no \
fees. A damaged or lost item has to be paid for at its price when new. Whoever owes more than ten euros cannot borrow until it is paid, \
in cash or by card, at the machine beside the stairs.

Rooms and computers. The reading room on the second floor is a quiet room: no telephone calls, and drinks only in closed bottles. Group \
rooms for up to six people can be booked for two hours a day, free of charge for members. There are eight computers on the first floor; \
a member can use one for an hour, and longer if nobody is waiting. Printing costs ten cents a page in black and thirty cents in colour. \
The wireless network is called Library Guest and needs no password.

Events. On Wednesday afternoon at four there is story time for children from three to six years. The reading circle for adults meets on \
the first Thursday of the month at half past six. Help with telephones, tablets and electronic books is given every Friday from two to \
four; no appointment is needed. All events are free.

Privacy. Do not ask for names, addresses, card numbers or passwords, and do not repeat them if a visitor writes them. You cannot see what \
anyone has borrowed and you cannot renew or reserve anything: explain how the visitor can do it. Give no legal, medical or financial \
advice; point to the books on the subject and to the staff. If somebody is rude, stay calm and polite. If somebody is in danger, tell \
them to call the emergency number at once."""

# Of different lengths, and no two begin alike for long.
QUESTIONS = (
    "How much does a card cost for an adult?",
    "When is the library open on Saturday?",
    "For how long can I borrow a film?",
    "I have lost my card. What should I do now?",
    "Is there a password for the wireless network?",
    "What does it cost to print ten pages in colour, and where can I do that?",
    "My daughter is four years old. Is there something for her this week?",
    "Can you renew my books for me?",
)


def chat_start(system: str) -> str:
    """A conversation's beginning in the format that SmolLM2 was trained on, up to what the user says.

    Args:
        system: the instructions.
    """
    return f"<|im_start|>system\n{system}<|im_end|>\n"


def chat_turn(question: str) -> str:
    """What follows: a user's turn, and the start of the answer.

    Args:
        question: what the user says.
    """
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def passages() -> Iterator[str]:
    """The prose of the pages of the language reference, one page after the other, without headings, tables and code.

    Yields:
        The paragraphs of a page joined by spaces, lines unwrapped.

    Example:
        >>> next(passages())[:48]
        'A Python program is constructed from code blocks'
    """
    from pydoc_data.topics import topics

    names = [name for name in _FIRST if name in topics] + sorted(set(topics) - set(_FIRST))
    for name in names:
        text = " ".join(_prose(topics[name]))
        if text:
            yield text


def _prose(page: str) -> Iterator[str]:
    for paragraph in page.split("\n\n"):
        lines = [line for line in paragraph.splitlines() if line.strip()]
        indented = any(line.startswith((" ", "*", "-", "+", "|", "[")) for line in lines)
        if lines and not indented and len(paragraph.split()) >= _LEAST_WORDS and "::=" not in paragraph:
            yield " ".join(lines)
