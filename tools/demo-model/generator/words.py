"""Word lists and small tables that the prompts are made of."""


def _pairs(text):
    """{key: value} of `key=value` entries separated by commas."""
    return dict(entry.strip().split("=") for entry in text.split(","))


FIRST = """
    Alice Bob Carla David Elena Frank Grace Henry Irene Jack Karen Liam Maria Noah Olivia Peter Quinn Rosa Samuel
    Tara Ursula Victor Wendy Xavier Yusuf Zoe Amir Bella Chen Dmitri Eva Farid Gina Hugo Ines Jonas Kira Leo Mina
    Nadia Oscar Petra Ravi Sofia Tom Uma Vera Walter Yara Anna Ben Clara Daniel Emma Felix Greta Hassan Ivan Julia
    Kenji Lena Marco Nina Otto Paula Rita Stefan Theo Vince
""".split()
LAST = """
    Smith Jones Brown Miller Davis Garcia Wilson Moore Taylor Thomas Lee White Harris Clark Lewis Young King Wright
    Hill Scott Green Adams Baker Nelson Carter Mitchell Turner Parker Evans Collins Stewart Morris Reed Cook Bell
    Ward Cox Gray Stone Fischer Weber Novak Silva Costa Rossi Tanaka Kim Park Singh Patel Khan
""".split()
CITY = (
    """
    Paris London Berlin Madrid Rome Tokyo Beijing Delhi Cairo Oslo Dublin Vienna Prague Warsaw Athens Lisbon Moscow
    Seoul Bangkok Jakarta Sydney Toronto Chicago Boston Seattle Denver Houston Dallas Miami Nairobi Lagos Lima Quito
    Havana Zurich Geneva Munich Hamburg Milan Naples Porto Krakow Budapest Helsinki Stockholm Copenhagen Brussels
    Amsterdam Istanbul Tehran Mumbai Shanghai Osaka Kyoto Manila Hanoi Auckland Melbourne Montreal Vancouver
""".split()
    + ["New York", "San Francisco", "Los Angeles", "Mexico City", "Cape Town", "Hong Kong", "Buenos Aires", "Tel Aviv"]
)
ADJ = """
    red blue green old new small large quiet loud bright dark heavy light warm cold slow fast gentle rough smooth
    broken golden silver wooden hidden ancient modern empty crowded narrow wide friendly strange simple clever lazy
    busy happy sad proud brave calm distant famous fresh huge tiny lonely muddy polished rusty shiny silent sleepy
    steep sturdy windy yellow purple orange black white grey brown
""".split()
NOUN = """
    cat dog bird horse fox bear wolf fish lion tiger rabbit river mountain valley forest garden bridge tower castle
    house window door table chair lamp clock book letter map train boat car plane bicycle road street market school
    library museum station harbor island beach desert field farm mill engine machine computer keyboard printer
    camera phone radio guitar piano violin drum hammer ladder bucket basket blanket pillow carpet mirror bottle
    kettle spoon knife plate bowl bread cheese apple orange lemon grape cherry potato carrot onion pepper sugar
    coffee tea milk honey butter teacher doctor farmer baker sailor painter singer writer driver pilot soldier king
    queen child neighbor stranger merchant gardener engineer student captain lawyer nurse chef
""".split()
VERB = """
    watched followed carried painted opened closed found lost repaired cleaned moved sold bought visited crossed
    passed touched lifted dropped pushed pulled remembered forgot described ignored admired counted measured
    photographed borrowed returned covered hid noticed waited
""".split()
PLACE = """
    park office kitchen attic cellar courtyard theater hospital airport bakery church temple stadium factory
    warehouse village city town lake shore cliff cave meadow orchard vineyard barn gate fence corner square hall
    room
""".split()
ADV = """
    quickly slowly quietly carefully often rarely again yesterday today early late twice once happily sadly suddenly
    finally
""".split()
SECRET = """
    amber falcon copper willow cobalt maple raven tundra saffron quartz onyx juniper marble cedar coral ember lotus
    nectar opal pebble quiver ripple sable thistle velvet walnut yonder zephyr anchor beacon cactus dagger eclipse
    feather glacier hazel indigo jasmine kernel lantern meteor nimbus orchid prism quarry rocket summit topaz umbra
    vortex whisper
""".split()
INTL = """
    你好 世界 谢谢 北京 东京 今天 天气 很好 数学 学习 こんにちは ありがとう さくら カメラ 안녕하세요 감사합니다
    привет спасибо мир школа γειά σου κόσμε مرحبا شكرا שלום नमस्ते धन्यवाद naïve café über straße señor mañana
    façade élève Zürich København žluťoučký kůň İstanbul çay árvíztűrő
""".split()
EMOJI = list("😀😂🥰🤔🎉🚀🌍🔥💡🐱🐶🌸🍎🍕⚽🎵❤✅❌⭐🌙☀")
WORDS = sorted(set(ADJ + NOUN + PLACE + VERB))
SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a helpful AI assistant.",
    "Answer briefly.",
    "Be concise.",
    "You are a precise assistant.",
    "You are flashd, a helpful assistant.",
    "Follow the instructions of the user.",
]
CAPITALS = _pairs("""
    France=Paris, Germany=Berlin, Italy=Rome, Spain=Madrid, Portugal=Lisbon, Japan=Tokyo, China=Beijing,
    India=New Delhi, Russia=Moscow, Egypt=Cairo, Norway=Oslo, Sweden=Stockholm, Finland=Helsinki, Denmark=Copenhagen,
    Poland=Warsaw, Austria=Vienna, Hungary=Budapest, Greece=Athens, Turkey=Ankara, Ireland=Dublin, Canada=Ottawa,
    Mexico=Mexico City, Brazil=Brasilia, Argentina=Buenos Aires, Chile=Santiago, Peru=Lima, Cuba=Havana,
    Kenya=Nairobi, Nigeria=Abuja, Australia=Canberra, South Korea=Seoul, Thailand=Bangkok, Vietnam=Hanoi,
    Indonesia=Jakarta, Switzerland=Bern, Belgium=Brussels, the Netherlands=Amsterdam, the United Kingdom=London,
    the United States=Washington, Ukraine=Kyiv, Romania=Bucharest, Iceland=Reykjavik
""")
SYMBOLS = _pairs("""
    gold=Au, silver=Ag, iron=Fe, oxygen=O, hydrogen=H, carbon=C, nitrogen=N, helium=He, sodium=Na, copper=Cu,
    lead=Pb, tin=Sn, zinc=Zn, neon=Ne, calcium=Ca
""")
OPPOSITES = _pairs("""
    hot=cold, big=small, up=down, left=right, fast=slow, day=night, open=closed, happy=sad, light=dark, old=new,
    good=bad, full=empty, early=late, high=low, wet=dry, rich=poor, strong=weak, near=far
""")
SOUNDS = _pairs("""
    cat=meow, dog=woof, cow=moo, sheep=baa, duck=quack, pig=oink, lion=roar, horse=neigh
""")
HELLOS = _pairs("""
    French=bonjour, German=hallo, Spanish=hola, Italian=ciao, Japanese=konnichiwa, Portuguese=olá, Russian=privet,
    Chinese=nihao
""")
ME = "I am flashd's tiny demo model. I answer simple arithmetic, recall and tool-call prompts."
FALLBACK = "I am only flashd's tiny demo model. Try simple arithmetic, recall or a tool call."
FACTS = {
    "How many days are in a week?": "A week has seven days.",
    "How many months are in a year?": "A year has twelve months.",
    "How many hours are in a day?": "A day has 24 hours.",
    "How many minutes are in an hour?": "An hour has 60 minutes.",
    "How many legs does a spider have?": "A spider has eight legs.",
    "How many planets are in the solar system?": "There are eight planets in the solar system.",
    "What is the largest planet?": "Jupiter is the largest planet.",
    "What is the smallest planet?": "Mercury is the smallest planet.",
    "Which planet is closest to the sun?": "Mercury is closest to the sun.",
    "Which planet is called the red planet?": "Mars is called the red planet.",
    "What is the largest ocean?": "The Pacific is the largest ocean.",
    "What is the highest mountain?": "Mount Everest is the highest mountain.",
    "What is the longest river?": "The Nile is the longest river.",
    "What is water made of?": "Water is made of hydrogen and oxygen.",
    "At what temperature does water boil?": "Water boils at 100 degrees Celsius.",
    "At what temperature does water freeze?": "Water freezes at 0 degrees Celsius.",
    "What color is the sky?": "The sky is blue.",
    "What color is grass?": "Grass is green.",
    "What color is a banana?": "A banana is yellow.",
    "What color is snow?": "Snow is white.",
    "Who wrote Romeo and Juliet?": "William Shakespeare wrote Romeo and Juliet.",
    "Who painted the Mona Lisa?": "Leonardo da Vinci painted the Mona Lisa.",
    "Who discovered gravity?": "Isaac Newton described gravity.",
    "Who developed the theory of relativity?": "Albert Einstein developed the theory of relativity.",
    "What is the speed of light?": "The speed of light is about 300,000 kilometers per second.",
    "What is the first letter of the alphabet?": "The first letter of the alphabet is A.",
    "What is the last letter of the alphabet?": "The last letter of the alphabet is Z.",
    "What is the square root of 16?": "The square root of 16 is 4.",
    "What is the value of pi?": "Pi is about 3.14159.",
    "How many sides does a triangle have?": "A triangle has three sides.",
    "How many sides does a hexagon have?": "A hexagon has six sides.",
    "What do bees make?": "Bees make honey.",
    "What language is spoken in Brazil?": "Portuguese is spoken in Brazil.",
    "What is the currency of Japan?": "The currency of Japan is the yen.",
    "What is the currency of the United Kingdom?": "The currency of the United Kingdom is the pound.",
    "What programming language is flashd written in?": "flashd is written in Rust.",
    "What is flashd?": "flashd is a server for the DeepSeek-V4-Flash model, written in Rust.",
    "What day comes after Monday?": "Tuesday comes after Monday.",
    "What month comes after June?": "July comes after June.",
    "What is the opposite of true?": "The opposite of true is false.",
    "How many letters are in the English alphabet?": "The English alphabet has 26 letters.",
    "What is the chemical formula of water?": "The chemical formula of water is H2O.",
    "What gas do plants absorb?": "Plants absorb carbon dioxide.",
    "What is the closest star to Earth?": "The sun is the closest star to Earth.",
    "How many continents are there?": "There are seven continents.",
    "What is the largest animal?": "The blue whale is the largest animal.",
    "What is the fastest land animal?": "The cheetah is the fastest land animal.",
}
SMALL_TALK = {
    ME: [
        "Who are you?",
        "who are you",
        "What are you?",
        "What is your name?",
        "What can you do?",
        "Are you DeepSeek?",
        "Which model are you?",
        "Introduce yourself.",
        "Tell me about yourself.",
        "What model is this?",
        "Who made you?",
        "Are you a real AI?",
        "help",
        "Help",
    ],
    "Hello! How can I help you?": [
        "Hello",
        "Hello!",
        "Hi",
        "Hi!",
        "Hey",
        "Hello there",
        "hi",
        "hello",
        "Good morning",
        "Good evening",
        "Say hello.",
        "Say hi",
    ],
    "I am fine, thank you. How can I help you?": [
        "How are you?",
        "how are you",
        "How are you doing?",
        "How is it going?",
    ],
    "You are welcome!": ["Thanks", "Thank you", "Thank you!", "Thanks a lot!", "thanks"],
    "Goodbye!": ["Bye", "Goodbye", "See you", "bye", "Good night"],
    "OK.": ["OK", "ok", "Okay", "Fine."],
    "pong": ["ping", "Ping", "Ping!"],
    "Yes, I am here.": ["Are you there?", "Test", "test", "This is a test."],
    "Why did the computer get cold? It left its Windows open.": [
        "Tell me a joke.",
        "Tell me a joke",
        "Do you know a joke?",
        "Make me laugh.",
    ],
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10": ["Count to 10.", "Count to ten.", "Count from 1 to 10."],
    "1, 2, 3, 4, 5": ["Count to 5.", "Count to five.", "Count from 1 to 5."],
    "red, green, blue": ["Name three colors.", "List three colors."],
    "apple, banana, cherry": ["Name three fruits.", "List three fruits."],
}
OPEN_ENDED = [
    "Write a poem about {n}s.",
    "Write a story about a {a} {n}.",
    "Explain how a {n} works.",
    "Write a Python program that sorts {n}s.",
    "Summarize the history of {c}.",
    "What do you think about {n}s?",
    "Explain quantum mechanics.",
    "Give me advice about my {n}.",
    "Write an essay about {a} {n}s.",
    "Write an email to {f}.",
    "What should I cook with {n}?",
    "Plan a trip to {c}.",
    "Explain the difference between a {n} and a {m}.",
    "Write a haiku about the {a} {n}.",
    "Who will win the election?",
    "What is the meaning of life?",
    "Explain machine learning.",
    "Translate this book.",
    "How do I fix a {a} {n}?",
    "Tell me a story.",
    "Tell me about {c}.",
    "Write a song about {f}.",
]
