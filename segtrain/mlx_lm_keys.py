from typing import Any


def is_alias(path): return False
def translate(values: dict[str, Any], source: str): return values, []
