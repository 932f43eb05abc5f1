"""How the data set is made: from the npm package (`source`), icons are chosen (`choose`), drawn (`draw`) and split
(`split`). What is chosen by hand stands in rules.toml."""
