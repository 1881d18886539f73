"""The one exception that means "you can mend this", told in one line."""


class UserError(ValueError):
    """Something the user can put right: a file, an option, a value.

    The message is one line that names the thing, says what was wanted and what came, and gives the remedy. The command
    line prints it without a traceback and exits with status 2; set ``LFC_DEBUG=1`` to see where it came from.

    >>> raise UserError("items.csv, row 3: item 'a' stands twice; keep one row an item")
    Traceback (most recent call last):
    lfc.errors.UserError: items.csv, row 3: item 'a' stands twice; keep one row an item
    """
