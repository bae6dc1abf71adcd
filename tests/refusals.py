"""What commands say that were called wrongly."""


def misuse(result):
    """What is wrong with a command line, told below its usage; such a command ends with 2."""
    assert result.exit_code == 2, result.output + repr(result.exception)
    usage, error, where = result.stderr.splitlines()[-3:]
    assert usage.startswith("Usage: ")
    assert error.startswith("error: ")
    assert where.endswith(" --help` lists the options")
    return error.removeprefix("error: ")
