"""Arguments and options that several commands share."""

import click

overrides_argument = click.argument("overrides", nargs=-1, metavar="[KEY.PATH=VALUE]...")
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
