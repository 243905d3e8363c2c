import verifiers.v1 as vf
from verifiers.v1.mcp import SharedToolsetConfig


class ProductsToolsConfig(SharedToolsetConfig):
    broken: bool = False


class ProductsToolset(vf.Toolset[ProductsToolsConfig]):
    TOOL_PREFIX = None

    async def setup(self) -> None:
        if self.config.broken:
            raise RuntimeError("the tables are missing")

    @vf.tool
    def multiply(self, a: int, b: int) -> str:
        """Multiply two numbers."""
        return str(a * b)


if __name__ == "__main__":
    ProductsToolset.run()
