"""Recurrent layers over whole rows: scans in groups of tokens, each with a gradient whose memory is one group's.

`grouped.scan` turns a function of some tokens and a state into a scan over all tokens. Each recurrence is a file of
its own with three parts: the rule a token at a time (the reference), the same rule for many tokens at once (`chunk`),
and an entry that calls `scan` with it. The entry takes the state before the first token and returns the state after
the last one, so that a prompt's state can serve several continuations.
"""
