import verifiers.v1 as vf
from verifiers.v1.mcp import SharedToolsetConfig


class ProductsToolset(vf.Toolset[SharedToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def multiply(self, a: int, b: int) -> str:
        """Multiply two numbers."""
        return str(a * b)


if __name__ == "__main__":
    ProductsToolset.run()
