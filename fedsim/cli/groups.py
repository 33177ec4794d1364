"""The help page of `fedsim`, with its commands by purpose."""

import click


class GroupedCommands(click.Group):
    """A group of commands whose help page has a section for each purpose."""

    def __init__(self, *args: object, **settings: object) -> None:
        super().__init__(*args, **settings)  # type: ignore[arg-type]
        self._sections: dict[str, list[str]] = {}

    def add_section(self, title: str, *commands: click.Command) -> None:
        """Add commands under a title.

        Args:
            title: the title of their section in the help page.
            commands: in the order of the help page.
        """
        for command in commands:
            self.add_command(command)
        self._sections[title] = [str(command.name) for command in commands]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuse what no operating system takes as a path, whatever option it is for.

        Raises:
            UsageError: an argument has a NUL character.
        """
        for argument in args:
            if "\0" in argument:
                raise click.UsageError(
                    f"{argument!r:.80} has a NUL character; no path has one", ctx
                )
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, section by section."""
        return [name for names in self._sections.values() for name in names]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections of the help page."""
        width = max(map(len, self.commands))
        limit = formatter.width - 6 - width
        for title, names in self._sections.items():
            rows = [
                (f"{name:<{width}}", self.commands[name].get_short_help_str(limit))
                for name in names
            ]
            with formatter.section(title):
                formatter.write_dl(rows)
