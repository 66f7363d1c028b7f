"""Tests plan for themselves: what they find on disk they have put there, in a folder of their own."""

import os

os.environ["ROCKMATE_CACHE"] = "off"  # before anything plans; programs that tests start inherit it
