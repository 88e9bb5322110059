"""`specbridge explain`: what a round reads and costs, and what each part of the system gives, measured.

One page of answers from counters of the three processes, their own description (GetInfo) and requests made
for the purpose, in turns.

    command  options    find      addresses          clients  the processes
    campaign the plan   switches  stacks without a part       measure  bursts in turns
    rounds   counters → a mean round    comparisons  pairs → a verdict    account  bytes, floors, ranks
    answers  a question's part          report  all of them
    text, html, charts, svg, words      the report for people
"""
