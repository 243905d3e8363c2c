import verifiers.v1 as vf


class SumsToolset(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "sums"

    @vf.tool
    def times(self, a: int, b: int) -> str:
        """Product of two numbers."""
        return str(a * b)


if __name__ == "__main__":
    SumsToolset.run()
