"""Tool calls: placeholder replaced below."""


class ToolParsing:
    @staticmethod
    def build(config, llm):
        return None
