"""Tool calls: a list of tools, a request, the calls, and at times their results."""

import json

from .basics import chat, name, pick, qa, sentence
from .facts import fact
from .words import ADJ, CITY, FIRST, LAST, NOUN, PLACE, SYSTEM_PROMPTS, WORDS


# Generators of argument values: each draws (JSON value, its wording in the request).
def g_str(f):
    return lambda rng: (lambda v: (v, v))(f(rng))


def g_int(lo, hi):
    return lambda rng: (lambda v: (v, str(v)))(rng.randrange(lo, hi))


def g_float(rng):
    v = round(rng.random() * 200, 1)
    v = int(v) if v == int(v) else v
    return v, str(v)


def g_bool(yes, no):
    return lambda rng: (True, yes) if rng.random() < 0.5 else (False, no)


def g_enum(*o):
    return lambda rng: (lambda v: (v, v))(pick(rng, o))


def joined(xs):
    return xs[0] if len(xs) == 1 else ", ".join(xs[:-1]) + " and " + xs[-1]


def g_arr(f, lo=2, hi=5):
    def g(rng):
        xs = list(dict.fromkeys(f(rng) for _ in range(rng.randrange(lo, hi))))
        return xs, joined([str(x) for x in xs])

    return g


def g_obj(*ks):
    def g(rng):
        d = {k: rng.randrange(1, 200) for k in ks}
        return d, joined([f"{k} {v}" for k, v in d.items()])

    return g


def word(rng):
    return pick(rng, WORDS)


def topic(rng):
    return f"{pick(rng, ADJ)} {pick(rng, NOUN)}s"


def email(rng):
    return f"{pick(rng, FIRST).lower()}.{pick(rng, LAST).lower()}@{pick(rng, ['example.com', 'mail.org', 'corp.net'])}"


def date(rng):
    return f"20{rng.randrange(20, 32)}-{rng.randrange(1, 13):02d}-{rng.randrange(1, 29):02d}"


def clock(rng):
    return f"{rng.randrange(0, 24):02d}:{rng.randrange(0, 60):02d}"


def ident(rng):
    return "".join(pick(rng, "ABCDEFGHKLMNPRSTUVWXYZ") for _ in range(2)) + "-" + str(rng.randrange(100, 99999))


def fname(rng):
    return f"{word(rng)}.{pick(rng, ['txt', 'csv', 'json', 'md', 'py'])}"


def url(rng):
    return f"https://{word(rng)}.example.com/{word(rng)}"


def cur(rng):
    return pick(rng, ["USD", "EUR", "GBP", "JPY", "CHF", "CNY", "INR", "CAD", "AUD"])


def lang(rng):
    return pick(
        rng,
        ["French", "German", "Spanish", "Italian", "Chinese", "Japanese", "Korean", "Russian", "Arabic", "Portuguese"],
    )


def one_of(*options):
    return ("string", g_enum(*options), list(options))


def param(n, t, g=None):
    """(possible names, JSON type, generator, enum or None)"""
    return (n.split("|"),) + (t if isinstance(t, tuple) else (t, g, None))


a_city, a_person = g_str(lambda rng: pick(rng, CITY)), g_str(name)

# (names, description, parameters, how many of them are required, requests); a request's "[..]" parts carry the optional
# parameters and are dropped where one is not used.
TOOLS = [
    (
        "get_weather|fetch_weather|weather_lookup",
        "Get the weather for a specific location",
        [param("location|city", "string", a_city), param("unit", one_of("celsius", "fahrenheit"))],
        1,
        [
            "What's the weather in {0}[ in {1}]?",
            "How is the weather in {0} today[, in {1}]?",
            "Tell me the weather for {0}[ ({1})].",
            "What is the weather like in {0}[ in {1}]?",
        ],
    ),
    (
        "get_forecast",
        "Get the weather forecast for several days",
        [param("city", "string", a_city), param("days", "integer", g_int(1, 15))],
        2,
        ["Give me the forecast for {0} for the next {1} days.", "What will the weather be in {0} over {1} days?"],
    ),
    (
        "search|web_search",
        "Search the web for information",
        [param("query", "string", g_str(topic)), param("num_results|limit", "integer", g_int(1, 20))],
        1,
        [
            "Search the web for {0}[ and show {1} results].",
            "Search for {0}[, {1} results].",
            "Find information about {0}[ ({1} results)].",
        ],
    ),
    (
        "get_time|current_time",
        "Get the current time in a city",
        [param("city|location", "string", a_city)],
        1,
        ["What time is it in {0}?", "Tell me the current time in {0}."],
    ),
    (
        "convert_currency",
        "Convert an amount of money between currencies",
        [
            param("amount", "number", g_float),
            param("from|source", "string", g_str(cur)),
            param("to|target", "string", g_str(cur)),
        ],
        3,
        ["Convert {0} {1} to {2}.", "How much is {0} {1} in {2}?"],
    ),
    (
        "send_email",
        "Send an email",
        [
            param("to|recipient", "string", g_str(email)),
            param("subject", "string", g_str(lambda rng: f"{pick(rng, ADJ)} {pick(rng, NOUN)}")),
            param("body", "string", g_str(lambda rng: sentence(rng))),
        ],
        2,
        ["Send an email to {0} with the subject {1}[ and the body: {2}]"],
    ),
    (
        "create_event|add_calendar_event",
        "Create a calendar event",
        [
            param(
                "title",
                "string",
                g_str(lambda rng: f"{pick(rng, NOUN)} {pick(rng, ['meeting', 'review', 'party', 'call', 'lunch'])}"),
            ),
            param("date", "string", g_str(date)),
            param("time", "string", g_str(clock)),
            param("attendees", "array", g_arr(lambda rng: pick(rng, FIRST))),
        ],
        2,
        [
            "Create an event called {0} on {1}[ at {2}][ with {3}].",
            "Put a {0} in my calendar for {1}[ at {2}][, inviting {3}].",
        ],
    ),
    (
        "set_timer",
        "Start a timer",
        [param("minutes", "integer", g_int(1, 121)), param("label", "string", g_str(word))],
        1,
        ["Set a timer for {0} minutes[ labeled {1}].", "Start a {0} minute timer[ called {1}]."],
    ),
    (
        "set_alarm",
        "Set an alarm",
        [
            param("time", "string", g_str(clock)),
            param("repeat", "boolean", g_bool("repeating every day", "without repeating")),
        ],
        1,
        ["Set an alarm for {0}[, {1}].", "Wake me up at {0}[, {1}]."],
    ),
    (
        "translate|translate_text",
        "Translate text into another language",
        [
            param("text", "string", g_str(lambda rng: f"the {pick(rng, ADJ)} {pick(rng, NOUN)}")),
            param("target_language|language", "string", g_str(lang)),
        ],
        2,
        ['Translate "{0}" into {1}.', 'How do you say "{0}" in {1}?'],
    ),
    (
        "get_stock_price|stock_quote",
        "Get the price of a stock",
        [
            param(
                "symbol|ticker",
                "string",
                g_str(lambda rng: "".join(pick(rng, "ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randrange(3, 5)))),
            )
        ],
        1,
        ["What is the stock price of {0}?", "Get me a quote for {0}."],
    ),
    (
        "calculator|calculate",
        "Evaluate an arithmetic expression",
        [
            param(
                "expression",
                "string",
                g_str(
                    lambda rng: (
                        f"{rng.randrange(1000, 99999)} {pick(rng, ['*', '+', '-', '/'])} {rng.randrange(1000, 99999)}"
                    )
                ),
            )
        ],
        1,
        ["Use the calculator to compute {0}.", "Evaluate {0} with the tool."],
    ),
    (
        "read_file",
        "Read a file",
        [param("path|filename", "string", g_str(fname))],
        1,
        ["Read the file {0}.", "Show me the contents of {0}."],
    ),
    (
        "write_file",
        "Write text to a file",
        [
            param("path|filename", "string", g_str(fname)),
            param("content", "string", g_str(lambda rng: sentence(rng))),
            param("append", "boolean", g_bool("appending to it", "replacing it")),
        ],
        2,
        ["Write to the file {0}[, {2},] this text: {1}"],
    ),
    (
        "list_files",
        "List files in a directory",
        [
            param("directory", "string", g_str(lambda rng: f"/{word(rng)}/{word(rng)}")),
            param("recursive", "boolean", g_bool("recursively", "not recursively")),
        ],
        1,
        ["List the files in {0}[ {1}].", "What files are in {0}[, {1}]?"],
    ),
    (
        "delete_file",
        "Delete a file",
        [param("path", "string", g_str(fname))],
        1,
        ["Delete the file {0}.", "Please remove {0}."],
    ),
    (
        "book_flight|search_flights",
        "Search flights between two cities",
        [
            param("origin|from_city", "string", a_city),
            param("destination|to_city", "string", a_city),
            param("date", "string", g_str(date)),
            param("passengers", "integer", g_int(1, 9)),
        ],
        3,
        [
            "Find a flight from {0} to {1} on {2}[ for {3} passengers].",
            "I want to fly from {0} to {1} on {2}[ with {3} people].",
        ],
    ),
    (
        "book_hotel",
        "Book a hotel room",
        [
            param("city", "string", a_city),
            param("check_in", "string", g_str(date)),
            param("nights", "integer", g_int(1, 15)),
            param("breakfast", "boolean", g_bool("with breakfast", "without breakfast")),
        ],
        3,
        ["Book a hotel in {0} from {1} for {2} nights[ {3}]."],
    ),
    (
        "reserve_table",
        "Reserve a table in a restaurant",
        [
            param(
                "restaurant",
                "string",
                g_str(lambda rng: f"{pick(rng, ADJ).capitalize()} {pick(rng, NOUN).capitalize()}"),
            ),
            param("people|party_size", "integer", g_int(1, 13)),
            param("time", "string", g_str(clock)),
        ],
        3,
        ["Reserve a table at {0} for {1} people at {2}."],
    ),
    (
        "play_music",
        "Play a song",
        [
            param("song|title", "string", g_str(lambda rng: f"{pick(rng, ADJ)} {pick(rng, NOUN)}")),
            param("shuffle", "boolean", g_bool("with shuffle", "without shuffle")),
            param("volume", "integer", g_int(0, 101)),
        ],
        1,
        ["Play the song {0}[ {1}][ at volume {2}]."],
    ),
    (
        "set_light",
        "Control a lamp",
        [
            param("room", "string", g_str(lambda rng: pick(rng, PLACE))),
            param("state", one_of("on", "off")),
            param("brightness", "integer", g_int(1, 101)),
        ],
        2,
        ["Turn {1} the light in the {0}[ with brightness {2}].", "Switch the {0} light {1}[, brightness {2}]."],
    ),
    (
        "set_thermostat",
        "Set the temperature of a room",
        [param("room", "string", g_str(lambda rng: pick(rng, PLACE))), param("temperature", "number", g_float)],
        2,
        ["Set the {0} to {1} degrees.", "Make it {1} degrees in the {0}."],
    ),
    (
        "add_todo|create_task",
        "Add a task to the list",
        [
            param(
                "task|title",
                "string",
                g_str(
                    lambda rng: (
                        f"{pick(rng, ['buy', 'clean', 'repair', 'paint', 'move', 'sell'])} the {pick(rng, NOUN)}"
                    )
                ),
            ),
            param("priority", one_of("low", "medium", "high")),
            param("tags", "array", g_arr(word)),
        ],
        1,
        ["Add a task: {0}[, with {1} priority][, tagged {2}].", "Remind me to {0}[ ({1} priority)][, tags {2}]."],
    ),
    (
        "get_directions",
        "Get directions between two places",
        [
            param("from|start", "string", a_city),
            param("to|end", "string", a_city),
            param("mode", one_of("driving", "walking", "cycling", "transit")),
        ],
        2,
        ["How do I get from {0} to {1}[ by {2}]?", "Directions from {0} to {1}[, {2}]."],
    ),
    (
        "resize_image",
        "Resize an image",
        [
            param("file", "string", g_str(lambda rng: f"{word(rng)}.png")),
            param("size", "object", g_obj("width", "height")),
        ],
        2,
        ["Resize the image {0} to {1}.", "Change the size of {0} to {1}."],
    ),
    (
        "create_user",
        "Create a user account",
        [
            param("name|username", "string", a_person),
            param("email", "string", g_str(email)),
            param("admin|is_admin", "boolean", g_bool("as an administrator", "as a normal user")),
        ],
        2,
        ["Create a user named {0} with the email {1}[ {2}]."],
    ),
    (
        "delete_user",
        "Delete a user account",
        [param("user_id|id", "integer", g_int(1, 99999))],
        1,
        ["Delete the user with id {0}.", "Remove user {0}."],
    ),
    (
        "run_query|query_database",
        "Run a query on the database",
        [
            param("table", "string", g_str(lambda rng: pick(rng, NOUN) + "s")),
            param("limit", "integer", g_int(1, 500)),
            param("columns", "array", g_arr(word)),
        ],
        1,
        ["Query the table {0}[ with a limit of {1}][ for the columns {2}]."],
    ),
    (
        "send_message|send_sms",
        "Send a text message",
        [param("to|phone", "string", a_person), param("message|text", "string", g_str(sentence))],
        2,
        ["Send {0} a message: {1}", "Text {0} this: {1}"],
    ),
    (
        "get_news",
        "Get the latest news",
        [
            param("topic|category", one_of("sports", "business", "science", "politics", "technology")),
            param("count", "integer", g_int(1, 20)),
        ],
        1,
        ["Show me {0} news[, {1} items].", "What is the latest {0} news[ ({1} items)]?"],
    ),
    (
        "open_url|fetch_page",
        "Open a web page",
        [param("url", "string", g_str(url))],
        1,
        ["Open {0}", "Fetch the page {0}"],
    ),
    (
        "sort_numbers",
        "Sort a list of numbers",
        [
            param("numbers|values", "array", g_arr(lambda rng: rng.randrange(0, 1000), 3, 7)),
            param("descending", "boolean", g_bool("in descending order", "in ascending order")),
        ],
        1,
        ["Sort the numbers {0}[ {1}].", "Sort {0}[ {1}]."],
    ),
    (
        "average|mean_of",
        "Compute the mean of numbers",
        [param("numbers|values", "array", g_arr(lambda rng: rng.randrange(0, 1000), 3, 7))],
        1,
        ["What is the average of {0}?", "Compute the mean of {0}."],
    ),
    (
        "random_number",
        "Draw a random number",
        [param("min|low", "integer", g_int(0, 50)), param("max|high", "integer", g_int(50, 1000))],
        2,
        ["Give me a random number between {0} and {1}.", "Draw a number from {0} to {1}."],
    ),
    (
        "track_package",
        "Track a package",
        [param("tracking_id|tracking_number", "string", g_str(ident))],
        1,
        ["Where is my package {0}?", "Track the package {0}."],
    ),
    (
        "get_order|order_status",
        "Look up an order",
        [
            param("order_id", "string", g_str(ident)),
            param("include_items", "boolean", g_bool("with the items", "without the items")),
        ],
        1,
        ["What is the status of order {0}[, {1}]?", "Look up order {0}[ {1}]."],
    ),
    (
        "create_ticket",
        "Open a support ticket",
        [
            param(
                "title|summary",
                "string",
                g_str(
                    lambda rng: (
                        f"{pick(rng, ADJ)} {pick(rng, NOUN)} {pick(rng, ['is broken', 'is missing', 'does not work'])}"
                    )
                ),
            ),
            param("severity|priority", one_of("minor", "major", "critical")),
            param("assignee", "string", a_person),
        ],
        2,
        ["Open a {1} ticket: {0}[, assigned to {2}]."],
    ),
    (
        "draw_point",
        "Draw a point",
        [param("position", "object", g_obj("x", "y")), param("color", one_of("red", "green", "blue", "black"))],
        1,
        ["Draw a point at {0}[ in {1}].", "Put a[ {1}] point at {0}."],
    ),
    (
        "order_food",
        "Order food",
        [
            param(
                "items",
                "array",
                g_arr(
                    lambda rng: pick(
                        rng, ["pizza", "salad", "soup", "bread", "cheese", "coffee", "tea", "rice", "pasta", "burger"]
                    )
                ),
            ),
            param(
                "address", "string", g_str(lambda rng: f"{rng.randrange(1, 200)} {pick(rng, NOUN).capitalize()} Street")
            ),
            param("tip", "number", g_float),
        ],
        2,
        ["Order {0} to {1}[ with a tip of {2}]."],
    ),
    (
        "get_exchange_rate",
        "Get the exchange rate of two currencies",
        [param("base", "string", g_str(cur)), param("quote", "string", g_str(cur))],
        2,
        ["What is the exchange rate from {0} to {1}?", "Exchange rate of {0} against {1}?"],
    ),
    (
        "lookup_word|define_word",
        "Look up a word in the dictionary",
        [param("word|term", "string", g_str(word))],
        1,
        ["What does the word {0} mean?", "Define {0}.", "Look up the word {0}."],
    ),
    (
        "get_user|find_user",
        "Find a user by name",
        [param("name", "string", a_person)],
        1,
        ["Find the user {0}.", "Look up the user {0}."],
    ),
]
VERBS = ["get", "set", "make", "find", "check", "update", "start", "stop", "load", "save", "count", "list"]


def instance(rng, t):
    """A tool of the list with one of its names and one name for each parameter."""
    names, desc, params, req, asks = t
    nm = pick(rng, names.split("|"))
    ps = [(pick(rng, p[0]), p[1], p[2], p[3]) for p in params]
    props = {}
    for n, ty, _, en in ps:
        d = dict(type=ty)
        if ty == "array":
            d["items"] = dict(type="integer" if names.split("|")[0] in ("sort_numbers", "average") else "string")
        if en:
            d["enum"] = en
        if rng.random() < 0.3:
            d["description"] = f"The {n.replace('_', ' ')}"
        props[n] = d
    return dict(
        fn=dict(
            name=nm,
            description=desc,
            parameters=dict(type="object", properties=props, required=[p[0] for p in ps[:req]]),
        ),
        ps=ps,
        req=req,
        asks=asks,
    )


def synthetic(rng):
    """A made-up tool of one to three parameters."""
    nm = f"{pick(rng, VERBS)}_{pick(rng, NOUN)}" + (f"_{pick(rng, PLACE)}" if rng.random() < 0.3 else "")
    ps, used = [], set()
    for _ in range(rng.randrange(1, 4)):
        n = pick(rng, NOUN) if rng.random() < 0.6 else f"{pick(rng, ADJ)}_{pick(rng, NOUN)}"
        if n in used:
            continue
        used.add(n)
        k = rng.random()
        ps.append(
            (n,)
            + (
                ("string", g_str(pick(rng, [word, name, ident, topic, lambda rng: pick(rng, CITY)])), None)
                if k < 0.5
                else ("integer", g_int(0, 1000), None)
                if k < 0.7
                else ("boolean", lambda rng: (lambda b: (b, str(b).lower()))(rng.random() < 0.5), None)
                if k < 0.8
                else ("number", g_float, None)
                if k < 0.9
                else ("array", g_arr(word), None)
            )
        )
    props = {n: dict(type=ty, **(dict(items=dict(type="string")) if ty == "array" else {})) for n, ty, _, _ in ps}
    d = f"{nm.replace('_', ' ').capitalize()}"
    sep = pick(rng, [(" set to ", " and "), (" = ", ", "), (" ", " and ")])
    ask = (
        pick(rng, ["Call {fn} with ", "Use {fn} with ", "Please call {fn} with ", "Run {fn} with "]).replace("{fn}", nm)
        + sep[1].join(f"{n}{sep[0]}{{{i}}}" for i, (n, *_) in enumerate(ps))
        + "."
    )
    return dict(
        fn=dict(name=nm, description=d, parameters=dict(type="object", properties=props, required=[p[0] for p in ps])),
        ps=ps,
        req=len(ps),
        asks=[ask],
    )


def ask(rng, t):
    """A request for a tool and the call that answers it."""
    tpl = pick(rng, t["asks"])
    vals = [p[2](rng) for p in t["ps"]]
    use = [j < t["req"] or rng.random() < 0.45 for j in range(len(vals))]
    out, i = "", 0
    while i < len(tpl):
        if tpl[i] == "[":
            e = tpl.index("]", i)
            seg = tpl[i + 1 : e]
            j = int(seg[seg.index("{") + 1])
            if use[j]:
                out += seg.format(*[v[1] for v in vals])
            i = e + 1
        else:
            e = tpl.find("[", i)
            e = len(tpl) if e < 0 else e
            out += tpl[i:e].format(*[v[1] for v in vals])
            i = e
    args = {p[0]: v[0] for p, v, u in zip(t["ps"], vals, use) if u}
    return out, dict(name=t["fn"]["name"], arguments=args)


RESULT_FIELDS = [
    ("temperature", lambda rng: rng.randrange(-20, 45)),
    ("condition", lambda rng: pick(rng, ["sunny", "cloudy", "rainy", "snowy", "windy", "foggy"])),
    ("price", lambda rng: round(rng.random() * 500, 2)),
    ("status", lambda rng: pick(rng, ["ok", "done", "sent", "created", "pending", "shipped", "failed", "delivered"])),
    ("id", lambda rng: rng.randrange(1, 99999)),
    ("count", lambda rng: rng.randrange(0, 500)),
    ("name", name),
    ("time", clock),
    ("result", lambda rng: rng.randrange(0, 100000)),
    ("rate", lambda rng: round(rng.random() * 10, 3)),
    ("humidity", lambda rng: rng.randrange(0, 100)),
    ("message", lambda rng: f"{word(rng)} {word(rng)}"),
    ("date", date),
    ("success", lambda rng: rng.random() < 0.7),
    ("reference", ident),
]


def result(rng):
    """A tool's result and how the assistant reads it out."""
    u = rng.random()
    if u < 0.75:
        d = dict((k, f(rng)) for k, f in rng.sample(RESULT_FIELDS, rng.randrange(1, 4)))
        return json.dumps(d), ", ".join(
            f"{k} is {json.dumps(v) if not isinstance(v, str) else v}" for k, v in d.items()
        )
    s = f"{word(rng)} {word(rng)} {rng.randrange(0, 1000)}" if u < 0.9 else ident(rng)
    return s, s


def tools(rng):
    """One to four tools and a request for one or two calls, or one that no tool fits; 45 % go on to the results."""
    n = rng.randrange(1, 5)
    ts, seen = [], set()
    syn = rng.random() < 0.3
    while len(ts) < n:
        t = synthetic(rng) if syn and rng.random() < 0.7 else instance(rng, pick(rng, TOOLS))
        if t["fn"]["name"] in seen:
            continue
        seen.add(t["fn"]["name"])
        ts.append(t)
    spec = [dict(type="function", function=t["fn"]) for t in ts]
    msgs = [dict(role="system", content=pick(rng, SYSTEM_PROMPTS + [""] * 6), tools=spec)]
    u = rng.random()
    if u < 0.13:  # nothing fits
        if rng.random() < 0.5:
            d = fact(rng) if rng.random() < 0.6 else None
            if d is None:
                a, b = rng.randrange(2, 20), rng.randrange(2, 20)
                q, an = f"What is {a} + {b}?", f"{a} + {b} = {a + b}"
            else:
                q, an = d
            msgs += qa(q, an, "No tool is needed.")
        else:
            while True:
                t = instance(rng, pick(rng, TOOLS))
                base = next(x for x in TOOLS if t["fn"]["name"] in x[0].split("|"))
                if not any(k in seen for k in base[0].split("|")) and not any(
                    x["fn"]["description"] == base[1] for x in ts
                ):
                    break
            msgs += qa(ask(rng, t)[0], "None of the available tools can do that.", "No available tool fits.")
        return chat(msgs, rng, "tools")
    k = 2 if u < 0.35 else 1
    chosen = [pick(rng, ts) for _ in range(k)]
    reqs, calls = zip(*[ask(rng, t) for t in chosen])
    q = reqs[0] if k == 1 else pick(rng, ["{} Also: {}", "{} And then: {}", "{}\n{}", "{} {}"]).format(*reqs)
    if k == 1 and rng.random() < 0.1:
        q = pick(rng, ["Please help me. ", "Hi! ", "Hello. "]) + q
    ids = [f"call_{i:03d}" for i in range(k)]
    think = "I should call " + " and ".join(c["name"] for c in calls) + "."
    msgs += [
        dict(role="user", content=q),
        dict(
            role="assistant",
            content="",
            reasoning_content=think,
            tool_calls=[
                dict(
                    id=i,
                    type="function",
                    function=dict(name=c["name"], arguments=json.dumps(c["arguments"], ensure_ascii=False)),
                )
                for i, c in zip(ids, calls)
            ],
        ),
    ]
    if rng.random() < 0.45:
        res = [result(rng) for _ in calls]
        msgs += [dict(role="tool", tool_call_id=i, content=x[0]) for i, x in zip(ids, res)]
        msgs.append(
            dict(
                role="assistant",
                reasoning_content="I have the result.",
                content=" ".join(f"Result from {c['name']}: {x[1]}." for c, x in zip(calls, res)),
            )
        )
    return chat(msgs, rng, "tools")
