"""Run run/generate.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("run.generate", run_name="__main__", alter_sys=True)
