"""The two ways in which a command ends badly on purpose, which the command line maps to exit codes; and their words."""


class UserError(ValueError):
    """The recipe, the data or the usage is wrong: exit code 2. The message names the place, the value and the fix."""


class RunFailed(RuntimeError):
    """The run itself failed (NaN loss, out of memory, a plan that doesn't fit): exit code 1."""


def reason(error: BaseException, most: int = 600) -> str:
    """What another library's error says, in one line: its whole message, then that of the error it came from."""
    found: list[str] = []
    current: BaseException | None = error
    while current is not None and len(found) < 3:
        text = " ".join(str(current).split())
        if not text or isinstance(current, LookupError):  # whose text is a bare key
            text = f"{type(current).__name__}: {text}".removesuffix(": ")
        if not any(text in other for other in found):
            found.append(text)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    line = "; caused by: ".join(found)
    return line if len(line) <= most else f"{line[: most - 1]}…"


def counted(number: int, noun: str, nouns: str = "") -> str:
    """`1 row`, `1,262 rows`: a count before its noun, whose plural is `nouns` where an s isn't enough."""
    return f"{number:,} {noun if number == 1 else nouns or f'{noun}s'}"
