"""The texts that `word_problems` fills: whole stories, and the parts of chains. The syntax is described there.

Fields: n, m, l are three different names; o and u two different things (plural); box and boxes a vessel.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Template:
    """`draws` names the numbers with their bounds; `steps` calculate with them, the last one the answer."""

    key: str
    text: str
    draws: str
    steps: tuple[str, ...]


NAMES = (
    "Mia", "Noah", "Lena", "Omar", "Priya", "Jonas", "Aiko", "Diego", "Hanna", "Felix", "Zara", "Ivan", "Nora", "Kofi",
    "Elif", "Tomas", "Ruth", "Samir", "Greta", "Luca", "Yara", "Emil", "Clara", "Bruno", "Tess", "Amir", "Ines",
    "Oscar",
    "Vera", "Malik", "June", "Pablo", "Edda", "Ravi", "Lotte", "Hugo", "Naomi", "Arlo", "Selma", "Theo",
)  # fmt: skip
THINGS = (
    "pencils", "marbles", "stickers", "apples", "cards", "shells", "buttons", "stamps", "beads", "coins", "plums",
    "books",
    "ribbons", "candles", "postcards", "walnuts", "balloons", "crayons", "tomatoes", "badges", "blocks", "cookies",
    "muffins", "seeds", "lemons", "bottles", "notebooks", "flowers", "magnets", "pears", "tiles", "keys",
)  # fmt: skip
VESSELS = (
    ("box", "boxes"), ("bag", "bags"), ("basket", "baskets"), ("crate", "crates"), ("jar", "jars"),
    ("drawer", "drawers"),
    ("tin", "tins"), ("bucket", "buckets"),
)  # fmt: skip

# Chains. A start gives the quantity v0; a change or an ending takes v, draws k and gives w.
STARTS = {
    "own": Template("own", "{n} has {a} {o} and [finds|buys] {b} more.", "a 3-60, b 2-40", (
        "v0 = a + b: {n} starts with {=} {o}.",)),
    "packs": Template("packs", "{n} has {a} {boxes} with {b} {o} in each {box}.", "a 2-9, b 3-12", (
        "v0 = a * b: The {boxes} hold {=} {o}.",)),
    "pool": Template("pool", "{n} brings {a} {o} and {m} brings {b} {o}; they [put|keep] them together.", "a 3-50, b "
        "3-50", (
        "v0 = a + b: Together they bring {=} {o}.",)),
    "spent": Template("spent", "{n} had {a} {o} [yesterday|last week] and has used {b} of them since.", "a 12-99, b "
        "3-60", (
        "v0 = a - b: There are {=} {o} at first.",)),
}  # fmt: skip
CHANGES = {
    "gain": Template("gain", "[Then|Later|After that] {n} [finds|buys|is given] {k} more {o}.", "k 2-60", (
        "w = v + k: Then there are {=} {o}.",)),
    "lose": Template("lose", "[Then|Later|After that] {n} [loses|sells|gives away] {k} of the {o}.", "k 2-60", (
        "w = v - k: Then there are {=} {o} left.",)),
    "grow": Template("grow", "[Soon|By summer] there are {k} times as many {o}.", "k 2-6", (
        "w = v * k: That grows to {=} {o}.",)),
    "half": Template("half", "{n} gives half of the {o} to {m}.", "", (
        "w = v / 2: Half of the {o} is {=}.",)),
    "third": Template("third", "{n} keeps one third of the {o} and gives the rest to {m}.", "", (
        "w = v / 3: One third of the {o} is {=}.",)),
    "split": Template("split", "{n} splits the {o} equally among {k} friends and looks at one friend's share.", "k "
        "2-9", (
        "w = v / k: Each share is {=} {o}.",)),
    "double": Template("double", "{m} [adds|brings] just as many {o} as there are already.", "", (
        "w = v * 2: Now there are {=} {o}.",)),
}  # fmt: skip
ENDINGS = {
    "more": Template("more", "{l} has {k} more {o} than that. How many {o} does {l} have?", "k 2-60", (
        "w = v + k: {l} has {=} {o}.",)),
    "fewer": Template("fewer", "{l} has {k} fewer {o} than that. How many {o} does {l} have?", "k 2-60", (
        "w = v - k: {l} has {=} {o}.",)),
    "sale": Template("sale", "Each of these {o} is sold for {k} dollars. How many dollars does that bring?", "k 2-9", (
        "w = v * k: The sale brings {=} dollars.",)),
    "bags": Template("bags", "They are packed {k} to a {box}. How many {boxes} are needed?", "k 2-9", (
        "w = v / k: They fill {=} {boxes}.",)),
    "both": Template("both", "{l} has {k} {o}. How many {o} is that [together|in all]?", "k 2-99", (
        "w = v + k: In all there are {=} {o}.",)),
}  # fmt: skip

TEMPLATES = (
    Template("leftover", "{n} [packs|fills] {a} {boxes} with {b} {o} in each {box} and has {c} {o} left over. "
        "How many {o} does {n} have [in all|altogether]?", "a 2-12, b 3-40, c 2-60", (
        "p = a * b: The {boxes} hold {=} {o}.", "q = p + c: {n} has {=} {o} in all.")),
    Template("giveaway", "{n} has {a} {boxes} of {o} with {b} in each {box}. {n} gives {c} {o} to {m}. "
        "How many {o} [are left|does {n} still have]?", "a 2-12, b 3-40, c 5-99", (
        "p = a * b: {n} has {=} {o}.", "q = p - c: After the gift {=} {o} are left.")),
    Template("prices", "{n} buys {a} {o} for {b} dollars each and {c} {u} for {d} dollars each. "
        "How much does {n} [pay|spend] in all?", "a 2-12, b 2-25, c 2-12, d 2-25", (
        "p = a * b: The {o} cost {=} dollars.", "q = c * d: The {u} cost {=} dollars.",
        "r = p + q: {n} pays {=} dollars.")),
    Template("change", "{n} has {d} dollars and buys {a} {o} at {b} dollars each. How many dollars [are left|remain]?",
        "a 2-12, b 2-30, d 20-300", (
        "p = a * b: The {o} cost {=} dollars.", "q = d - p: {=} dollars are left.")),
    Template("wages", "{n} earns {a} dollars an hour [in a shop|on a farm|as a tutor]. {n} works {b} hours on Monday "
        "and "
        "{c} hours on Tuesday. How much does {n} earn?", "a 5-30, b 2-9, c 2-9", (
        "p = b + c: {n} works {=} hours.", "q = p * a: {n} earns {=} dollars.")),
    Template("trip", "A [bus|train|boat] travels {b} hours at {a} miles an hour and then {c} more miles. "
        "How many miles does it travel?", "a 10-80, b 2-9, c 5-90", (
        "p = b * a: In {b} hours it travels {=} miles.", "q = p + c: In all it travels {=} miles.")),
    Template("remaining", "{n} has to drive {c} miles and has driven {b} hours at {a} miles an hour. "
        "How many miles are left?", "a 10-70, b 2-8, c 50-600", (
        "p = b * a: {n} has driven {=} miles.", "q = c - p: {=} miles are left.")),
    Template("more_total", "{n} [collects|has] {a} {o}. {m} [collects|has] {b} more {o} than {n}. "
        "How many {o} do they have together?", "a 5-99, b 3-99", (
        "p = a + b: {m} has {=} {o}.", "q = a + p: Together they have {=} {o}.")),
    Template("fewer_total", "{n} [collects|has] {a} {o}. {m} [collects|has] {b} fewer {o} than {n}. "
        "How many {o} do they have together?", "a 9-150, b 3-99", (
        "p = a - b: {m} has {=} {o}.", "q = a + p: Together they have {=} {o}.")),
    Template("times_total", "{m} has {b} times as many {o} as {n}, who has {a}. How many {o} do the two have "
        "[together|in all]?",
        "a 3-99, b 2-9", (
        "p = a * b: {m} has {=} {o}.", "q = a + p: Together they have {=} {o}.")),
    Template("three_people", "{n} has {a} {o}. {m} has {b} times as many as {n}. {l} has {c} fewer than {m}. "
        "How many {o} do the three have [together|in all]?", "a 3-40, b 2-8, c 2-60", (
        "p = a * b: {m} has {=} {o}.", "q = p - c: {l} has {=} {o}.", "r = a + p: {n} and {m} have {=} {o}.",
        "s = r + q: All three have {=} {o}.")),
    Template("share", "{n} picks {a} {o} and {m} picks {b} {o}. They share them equally among {c} "
        "[children|friends|neighbors]. "
        "How many {o} does each one get?", "a 4-90, b 4-90, c 2-12", (
        "p = a + b: Together they pick {=} {o}.", "q = p / c: Each one gets {=} {o}.")),
    Template("trays", "{n} bakes {a} trays of {b} rolls. The family eats {c} rolls, and {n} puts the rest into bags "
        "of {d}. "
        "How many bags does {n} fill?", "a 2-9, b 6-24, c 2-30, d 2-9", (
        "p = a * b: {n} bakes {=} rolls.", "q = p - c: Then {=} rolls are left.", "r = q / d: They fill {=} bags.")),
    Template("minutes", "{n} practices the [piano|violin|flute] for {a} hours and {b} minutes on Saturday and {c} "
        "minutes on "
        "Sunday. How many minutes is that?", "a 2-8, b 5-55, c 5-90", (
        "p = a * 60: {a} hours are {=} minutes.", "q = p + b: On Saturday that is {=} minutes.",
        "r = q + c: In all that is {=} minutes.")),
    Template("weeks", "{n} reads {a} pages every day for {b} weeks. How many pages does {n} read?", "a 2-12, b 2-9", (
        "p = b * 7: {b} weeks are {=} days.", "q = a * p: {n} reads {=} pages.")),
    Template("rope", "A rope is {a} feet and {b} inches long. {n} cuts off {c} inches. How many inches of rope are "
        "left?",
        "a 2-30, b 2-11, c 4-60", (
        "p = a * 12: {a} feet are {=} inches.", "q = p + b: The rope has {=} inches.", "r = q - c: {=} inches are "
        "left.")),
    Template("dozens", "{n} buys {a} dozen eggs and uses {b} of them [for cakes|for breakfast]. How many eggs are "
        "left?",
        "a 2-15, b 3-60", (
        "p = a * 12: {a} dozen are {=} eggs.", "q = p - b: {=} eggs are left.")),
    Template("savings", "A [bicycle|tent|drum|coat] costs {a} dollars. {n} has {b} dollars and saves {c} dollars a "
        "week. "
        "How many weeks does {n} need?", "a 30-300, b 5-120, c 2-12", (
        "p = a - b: {n} still needs {=} dollars.", "q = p / c: That takes {=} weeks.")),
    Template("fence", "A garden is {a} meters long and {b} meters wide. A fence around it costs {c} dollars a meter. "
        "How much does the fence cost?", "a 4-40, b 3-30, c 2-9", (
        "p = a + b: Length and width are {=} meters.", "q = p * 2: The fence has {=} meters.",
        "r = q * c: It costs {=} dollars.")),
    Template("seats", "A [hall|theater|tent] has {a} rows with {b} seats each. On Friday {c} seats are empty. "
        "How many seats are taken?", "a 4-30, b 5-30, c 5-99", (
        "p = a * b: There are {=} seats.", "q = p - c: {=} seats are taken.")),
    Template("average", "{n} scores {a}, {b} and {c} points in three games. What is the average?", "a 4-80, b 4-80, "
        "c 4-80", (
        "p = a + b: The first two games give {=} points.", "q = p + c: All three give {=} points.",
        "r = q / 3: The average is {=} points.")),
    Template("ages", "{n} is {a} years old and {m} is {b} times as old. How old will {m} be in {c} years?",
        "a 3-19, b 2-5, c 2-30", (
        "p = a * b: {m} is {=} years old.", "q = p + c: In {c} years {m} will be {=}.")),
    Template("older", "In {a} years {n} will be {b} years old. {m} is {c} years older than {n}. How old is {m} now?",
        "a 2-30, b 12-70, c 2-40", (
        "p = b - a: {n} is {=} years old now.", "q = p + c: {m} is {=} years old.")),
    Template("tickets", "A ticket costs {b} dollars for an adult and {d} dollars for a child. A group has {a} adults "
        "and "
        "{c} children and pays with {e} dollars. How many dollars does it get back?", "a 2-9, b 5-20, c 2-12, d "
        "2-12, e 50-300", (
        "p = a * b: The adults pay {=} dollars.", "q = c * d: The children pay {=} dollars.",
        "r = p + q: In all they pay {=} dollars.", "s = e - r: They get {=} dollars back.")),
    Template("machine", "A machine makes {a} {o} in {b} minutes. How many {o} does it make in {c} minutes?",
        "a 6-120, b 2-9, c 3-30", (
        "p = a / b: In one minute it makes {=} {o}.", "q = p * c: In {c} minutes it makes {=} {o}.")),
    Template("reading", "A book has {a} pages. {n} reads {b} pages a day for {c} days and wants to finish in {d} "
        "more days. "
        "How many pages a day does {n} have to read then?", "a 40-400, b 5-40, c 2-9, d 2-9", (
        "p = b * c: {n} has read {=} pages.", "q = a - p: {=} pages are left.", "r = q / d: That is {=} pages a day.")),
    Template("tank", "A tank holds {a} liters. A pipe brings {b} liters a minute and a leak loses {c} liters a minute. "
        "How many minutes does it take to fill the tank?", "a 20-400, b 5-20, c 2-12", (
        "p = b - c: The tank gains {=} liters a minute.", "q = a / p: It takes {=} minutes.")),
    Template("coupon", "A [lamp|scarf|game] costs {a} dollars, and a coupon takes {b} dollars off each one. {n} buys "
        "{c} of them. "
        "How much does {n} pay?", "a 8-60, b 2-20, c 2-12", (
        "p = a - b: Each one costs {=} dollars.", "q = p * c: {n} pays {=} dollars.")),
    Template("teams", "{a} girls and {b} boys form teams of {c}. Each team gets {d} {o}. How many {o} are needed?",
        "a 5-60, b 5-60, c 2-9, d 2-12", (
        "p = a + b: There are {=} children.", "q = p / c: They form {=} teams.", "r = q * d: The teams need {=} {o}.")),
    Template("profit", "{n} buys {a} {o} for {b} dollars each and sells them for {c} dollars each. How much does {n} "
        "gain?",
        "a 3-40, b 2-20, c 4-40", (
        "p = c - b: Each one brings {=} dollars.", "q = a * p: {n} gains {=} dollars.")),
)  # fmt: skip
