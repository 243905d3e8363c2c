import verifiers.v1 as vf


class SumsToolsConfig(vf.ToolsetConfig):
    broken: bool = False


class SumsToolset(vf.Toolset[SumsToolsConfig]):
    TOOL_PREFIX = "sums"

    async def setup(self) -> None:
        if self.config.broken:
            raise RuntimeError("the tables are missing")

    @vf.tool
    def times(self, a: int, b: int) -> str:
        """Product of two numbers."""
        return str(a * b)


if __name__ == "__main__":
    SumsToolset.run()
