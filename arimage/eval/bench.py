"""The parts of `arimage bench` under one name."""

from .judge import judge as judge
from .measure import choose_decodings as choose_decodings
from .measure import machine as machine
from .measure import measure as measure
from .tables import check_plot as check_plot
from .tables import compare as compare
from .tables import plot as plot
from .tables import read_json as read_json
from .tables import to_markdown as to_markdown
from .tables import write_json as write_json
