"""How the user turns of the self-written corpus begin, so that it holds the kinds of text people ask for.

A row starts with a bare user header, where the target invents the whole request; with a short *beginning*, where it goes on; or with a
*request*, a frame such as "Explain {topic} to a child." filled in by chance, to which the answer follows at once. A small model's own
requests drift away from what people write, and requests keep the first answer, which is what most readers measure, on the ground. All
are generic and self-written; none is taken from an evaluation prompt (a test compares them).
"""

from __future__ import annotations

import itertools

import numpy as np

CHAT = (
    "What is",
    "What are the",
    "How do I",
    "How can I",
    "Why do",
    "Why is",
    "Can you explain",
    "Could you",
    "I'm",
    "I have",
    "My",
    "Hi!",
    "Give me",
    "Tell me about",
    "Describe",
    "Compare",
    "List",
    "Who",
    "When",
    "Write a short story about",
    "Write a poem about",
    "Write an email to",
    "Write a",
    "Rewrite the following",
    "Summarize the following text:",
    "Summarize this in one sentence:",
    "Translate to French:",
    "Translate the following to Spanish:",
    "Correct the grammar:",
    "What would happen if",
    "Should I",
    "Help me",
    "Explain",
    "Explain to a child",
    "Suggest",
    "Make a plan",
    "Pretend you are",
    "Is it true that",
    "What's the difference between",
    "Name three",
    "In one paragraph,",
    "Here is a paragraph:",
)
MATHS = (
    "Solve",
    "Solve for x:",
    "Calculate",
    "If",
    "A shop sells",
    "A farmer has",
    "A train",
    "A rectangle has",
    "There are",
    "How many",
    "Find the",
    "What is the sum",
    "What is 1",
    "Maria has",
    "Tom and Anna",
    "A recipe needs",
    "A box contains",
    "The price of",
    "In a class of",
    "Each",
    "A car travels",
    "Convert",
    "Simplify",
    "The area of",
    "What percentage",
    "John bought",
    "It takes",
    "Last week,",
    "Compute step by step:",
    "A worker earns",
    "Sarah is",
    "The average of",
)
CODE = (
    "Write a Python function that",
    "Write a Python function to",
    "Write a function",
    "Write a Python program",
    "Write a SQL query",
    "Write a bash script",
    "Write a JavaScript function",
    "Write a class",
    "Implement",
    "Fix this code:",
    "What does this code do?\n\n```python\n",
    "Finish this function:\n\ndef ",
    "```python\ndef ",
    "def ",
    "from typing import List\n\ndef ",
    "Here is a Python function:\n\n```python\ndef ",
    "In Python, how",
    "Explain this error:",
    "Refactor",
    "Write unit tests for",
    "Given a list of",
    "Given a string",
    "Create a Python",
    "How do I sort",
    "How do I read a file",
    "Use a loop to",
    "Write a regular expression",
    "Write a C program",
    "Convert this code",
    "import ",
)

TOPICS = """
    volcanoes|coral reefs|the water cycle|gravity|the northern lights|honey bees|migrating birds|whales|mushrooms|dinosaurs
    the human heart|the immune system|vitamins|sleep|dreams|memory|stress|allergies|vaccines|antibiotics|the sense of smell|muscles
    DNA|electricity|magnets|batteries|solar panels|wind power|nuclear energy|lasers|radio waves|the telescope|the steam engine
    jet engines|computers|the internet|search engines|encryption|databases|robots|machine learning|video games|smartphones|email
    cloud storage|the printing press|the Silk Road|ancient Egypt|the Vikings|the Renaissance|the Industrial Revolution
    the space race|the Cold War|castles|pyramids|lighthouses|railways|bridges|canals|airports|the stock market|inflation
    interest rates|taxes|insurance|savings|supply and demand|small businesses|marketing|job interviews|public speaking|teamwork
    time management|negotiation|leadership|remote work|meetings|friendship|grief|gratitude|honesty|courage|jealousy|patience
    loneliness|kindness|democracy|elections|the constitution|human rights|the United Nations|refugees|recycling|climate change
    deforestation|plastic waste|drinking water|earthquakes|hurricanes|thunderstorms|snow|fog|rainbows|the moon|comets|Mars|the sun
    the stars|tides|rivers|deserts|rain forests|glaciers|jazz|classical music|the guitar|the piano|opera|ballet|theatre|photography
    oil painting|pottery|knitting|origami|calligraphy|poetry|novels|fairy tales|comic books|documentaries|animation|chess|football
    tennis|swimming|running|yoga|cycling|hiking|sailing|skiing|bread|cheese|chocolate|coffee|tea|olive oil|rice|pasta|soup|salad
    spices|breakfast|barbecue|vegetarian cooking|food storage|gardening|house plants|roses|tomatoes|compost|pets|dogs|cats|goldfish
    horses|chickens|spiders|sharks|elephants|penguins|wolves|moving house|renting a flat|buying a car|travelling by train
    packing a suitcase|camping|learning a language|keeping a diary|birthday parties|weddings|school holidays|homework|exams
    study groups|libraries|museums|city parks|public transport|traffic|first aid|a healthy diet|headaches|back pain|eye care
    dental care|exercise at home|screen time|meditation|good posture|colds
"""
PEOPLE = """
    a child|a beginner|my grandmother|an eight-year-old|a new colleague|a student|someone in a hurry|a teenager|a tourist|my team
"""
PLACES = """
    Paris|Tokyo|Cairo|Brazil|Canada|Iceland|India|Kenya|Peru|Spain|Italy|Norway|New Zealand|Vietnam|Mexico|Greece|Turkey|Poland
    Chicago|Berlin
"""
PERSONS = """
    my boss|a friend|a customer|my teacher|a neighbour|the editor|my sister|a hotel|the city council|a supplier|my doctor
"""
THINGS = """
    a lost key|an old piano|a lonely robot|a brave mouse|a talking tree|a hidden door|a broken clock|a long winter|the last bus
    a secret recipe|a paper boat|two brothers|a night train|a forgotten letter|an island|a stray dog|a magic coat|a small shop
"""
SENTENCES = """
    It began to rain, and nobody had an umbrella.|I have never seen so many people in one place.
    She opened the window and listened to the rain.|The museum is closed on Mondays.|My brother works in a bakery near the station.
    We should meet next week to talk about the plan.|He don't know where is the key.|Their is many reasons to be happy.
    I am going at the market yesterday.|The results was better than expected.|Thank you for your help; I really appreciate it.
    The meeting has been moved to Thursday afternoon.|Could you send me the report by Friday?
    The old bridge was built by farmers who wanted to reach the market on the other side of the river.
    Good coffee needs fresh beans and time.
    Last summer we planted forty trees along the road, and most of them survived the dry months.
    Children learn quickly when they play.
"""
CHAT_REQUESTS = (
    "What is {topic}?",
    "What are the main facts about {topic}?",
    "Explain {topic} to {people}.",
    "Tell me about {topic}.",
    "Why is {topic} important?",
    "How does one get started with {topic}?",
    "Give me five tips on {topic}.",
    "Write a short poem about {topic}.",
    "Write a short story about {thing}.",
    "Describe {topic} in one paragraph.",
    "What are the advantages and disadvantages of {topic}?",
    "What should everyone know about {topic}?",
    "List ten interesting facts about {topic}.",
    "What is the history of {topic}?",
    "Compare {topic} and {topic2}.",
    "What do {topic} and {topic2} have in common?",
    "Write an introduction for an essay about {topic}.",
    "Write an email to {person} about {topic}.",
    "Write a polite message to {person}.",
    "How can I learn more about {topic}?",
    "What are common mistakes with {topic}?",
    "Make a plan for a week with more time for {topic}.",
    "Is it worth spending money on {topic}?",
    "What would the world be like without {topic}?",
    "Write a dialogue about {topic}.",
    "Suggest a title for an article about {topic}.",
    "I want to visit {place}. What should I see there?",
    "What is the weather like in {place}?",
    "Tell me something about the food in {place}.",
    "Plan a three-day trip to {place}.",
    "What is {place} known for?",
    "Translate to Spanish: {sentence}",
    "Translate to French: {sentence}",
    "Translate into German: {sentence}",
    "Correct the grammar: {sentence}",
    "Rewrite this in a more formal way: {sentence}",
    "Make this sentence shorter: {sentence}",
    "Continue this story: {sentence}",
    "Summarize in one sentence: {sentence} {sentence2}",
    "What is the opposite of patience?",
    "Tell me a joke about {topic}.",
    "Write a slogan for a campaign about {topic}.",
    "Who invented {topic}?",
    "How do {topic} work?",
    "What happens when {topic} and {topic2} meet?",
    "How has {topic} changed over time?",
    "I'm interested in {topic}. Where do I begin?",
    "I have a question about {topic}. What is the most important thing?",
    "Write a story that begins with {thing}.",
    "Give a short definition of {topic}.",
    "Can you recommend a book about {topic}?",
)
NAMES = """
    Maria|Tom|Anna|Ahmed|Lucy|Peter|Sarah|David|Nina|Omar|Julia|Ben|Kim|Leo|Emma|Ravi|Clara|Jack|Mei|Paul
"""
GOODS = """
    apples|books|marbles|tickets|pencils|eggs|stickers|oranges|chairs|bottles|coins|flowers|cakes|shirts|boxes|balloons|stamps
    cookies
"""
MATHS_REQUESTS = (
    "{name} has {a} {goods} and buys {b} more. How many {goods} does {name} have now?",
    "{name} has {a} {goods} and gives {b} of them to {name2}. How many are left?",
    "A box holds {b} {goods}. How many {goods} are in {c} boxes?",
    "What is {a} + {b}?",
    "What is {a} - {b}?",
    "What is {a} x {c}?",
    "Calculate {a} divided by {c}.",
    "What is {c}% of {a}?",
    "Solve for x: {c}x + {b} = {a}",
    "Solve the equation {c}x - {b} = {a}.",
    "A shop sells {goods} for ${c} each. How much do {b} {goods} cost?",
    "What is the average of {a}, {b} and {c}?",
    "A car travels {a} km in {c} hours. What is its average speed?",
    "A rectangle is {b} cm long and {c} cm wide. Find its area.",
    "{name} is paid ${b} for an hour of work and works {c} hours. How much money is that?",
    "{name} is {b} years old, {name2} is {c}. How old are they together?",
    "There are {a} students in a school. {c}% of them walk to school. How many students walk?",
    "A shirt costs ${a}. It is on sale with {c}% off. What is the price now?",
    "Is {a} a prime number? Explain.",
    "{name} reads {c} pages a day. How many days does it take to read a book of {a} pages?",
    "Which numbers divide {a} without a remainder?",
    "{c} friends share {b} {goods} fairly. How many does each get, and how many are left over?",
    "What is the square of {c}?",
    "How many minutes are there in {c} hours?",
    "{name} saves ${c} every week. After how many weeks does {name} have ${a}?",
    "Add up {c}, {c2} and {c3}.",
    "What is the perimeter of a square with sides of {b} cm?",
    "A train leaves with {a} passengers. At the first stop {b} get off and {c} get on. How many passengers are on the train now?",
    "Explain how to add fractions with different denominators.",
    "What is a {c}-sided polygon, and how large are its angles together?",
)
LANGUAGES = """
    Python|Python|Python|Python|JavaScript|Java|C|C++|Go|Rust|Ruby|TypeScript
"""
TASKS = """
    adds two numbers|returns the larger of two numbers|checks whether a number is even|computes the sum of a list
    finds the smallest element|counts the vowels of a word|removes spaces from a string|joins a list of names with commas
    converts Celsius to Fahrenheit|converts miles to kilometres|counts down from ten|prints a multiplication table
    checks whether a year is a leap year|computes the area of a circle|returns the absolute value|swaps two variables
    squares every number of a list|sorts a list of dictionaries by a key|merges two dictionaries
    finds the common elements of two lists|reads a file line by line|writes a list to a file|parses a line of a log file
    downloads a web page|sends a request to an API|computes a running average|rounds a price to two digits
    names the weekday of a date|computes the days between two dates|checks a password's length|picks a random card|draws a lottery
    plays rock, paper, scissors|guesses a number|draws a triangle of stars|implements a stack|implements a queue
    implements a linked list|inserts a node into a binary tree|traverses a tree in order|sums a matrix|transposes a matrix
    multiplies two matrices|finds the position of an element|implements bubble sort|implements insertion sort
    computes the power of a number|computes a sum of digits|converts a number to binary|converts a number to words
    keeps a shopping list|models a bank account|models a car with a speed|converts JSON to a dictionary|reads settings from a file
    times a function|numbers the lines of a text|capitalizes each word|replaces vowels by stars|zips two lists
    filters out negative numbers
"""
CONCEPTS = """
    a variable|a loop|a function|recursion|a class|inheritance|an exception|a list comprehension|a dictionary|a tuple|a pointer
    a hash table|a binary tree|big O notation|a closure|a generator|a lambda|an API|a unit test|a regular expression|version control
    a virtual environment|a thread|a database index|a SQL join|a primary key|garbage collection|type hints|a package manager
    a compiler|an array|a stack|a queue
"""
CODE_REQUESTS = (
    "Write a {language} function that {task}.",
    "Write a {language} program that {task}.",
    "In {language}, write code that {task}.",
    "Show me {language} code that {task}, with comments.",
    "Write a short {language} script that {task}.",
    "Explain {concept} with an example.",
    "What is {concept} in {language}?",
    "Write a {language} function that {task} and explain how it works.",
    "How do I use {concept} in {language}?",
    "Write unit tests for a Python function that {task}.",
    "Write a Python class that {task}.",
    "Give an example of {concept} in {language}.",
    "Write a SQL query that lists all customers with more than {c} orders.",
    "Write a SQL query for the {c} highest salaries of a department.",
    "Write a bash command that finds all files larger than {b} MB.",
    "Create an HTML page about {topic}.",
    "Complete the function:\n\ndef f(n):\n",
)


def _choices(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.replace("\n", "|").split("|") if part.strip())


WORDS = {
    "topic": _choices(TOPICS),
    "people": _choices(PEOPLE),
    "place": _choices(PLACES),
    "person": _choices(PERSONS),
    "thing": _choices(THINGS),
    "sentence": _choices(SENTENCES),
    "name": _choices(NAMES),
    "goods": _choices(GOODS),
    "language": _choices(LANGUAGES),
    "task": _choices(TASKS),
    "concept": _choices(CONCEPTS),
}
BEGINNINGS = (CHAT, MATHS, CODE)
REQUESTS = (CHAT_REQUESTS, MATHS_REQUESTS, CODE_REQUESTS)


def beginning(random: np.random.Generator, kind: int) -> str:
    """The first words of a request of `kind` (0 chat, 1 maths, 2 code), to be gone on from."""
    return str(random.choice(BEGINNINGS[kind]))


def request(random: np.random.Generator, kind: int) -> str:
    """A whole request of `kind` (0 chat, 1 maths, 2 code)."""
    words = {name: str(random.choice(values)) for name, values in WORDS.items()}
    again = {f"{name}2": str(random.choice(WORDS[name])) for name in ("topic", "sentence", "name")}
    small = int(random.integers(2, 20))
    numbers = {"a": int(random.integers(20, 500)), "b": int(random.integers(5, 90)), "c": small, "c2": 2 * small, "c3": 3 * small}
    return str(random.choice(REQUESTS[kind])).format(**words, **again, **numbers)


def all_frames() -> tuple[str, ...]:
    """Every beginning and frame, for a comparison with evaluation prompts."""
    return tuple(itertools.chain(*BEGINNINGS, *REQUESTS))
