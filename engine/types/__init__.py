"""Types that cross a boundary; they know no layer above or below."""
