"""The words that name a needle: an adjective and a noun make a key."""

ADJECTIVES = """
able agile airy amber ample ancient arctic ashen autumn azure balmy bashful basic beige bitter blank blissful blunt
bold bouncy brave breezy brief bright brisk broad bronze bubbly burly busy calm candid careful casual cheery chilly
civil classic clean clever cloudy coastal comic cosmic cozy crafty crimson crisp curious curly daily dainty dapper
daring dark deep delicate dense dim distant dizzy drowsy dry dusky dusty eager early earnest earthen easy elder
elegant empty endless even exact fabled faded faint fair famous fancy feathered fertile fickle fierce fiery fine firm
fleet floral fluffy foggy fond formal fragile frank fresh friendly frosty frugal gentle giant giddy gilded glad
gleaming global golden graceful grand grassy gray great green hardy harsh hasty hazel hazy heavy hidden hollow honest
humble icy idle inner ivory jolly jovial keen kind late lavish lazy leafy lean level light limber linen lively lofty
lonely loud loyal lucid lucky lunar marble mellow merry mighty mild mint misty modest mossy muddy narrow native neat
nimble noble northern novel oaken odd olive opal open orange ornate pale patient pearly plain placid polite proud pure
quaint quick quiet rapid rare restless rigid ripe robust rosy round rustic sandy serene silent silver sturdy sunny
""".split()  # noqa: SIM905

NOUNS = """
acorn acrobat almanac anchor antler anvil apple apron arch armor arrow atlas attic badge badger bagpipe bakery balcony
banjo banner barley barn barrel basin basket bayou beacon beaver bell bench berry birch biscuit blanket blossom boat
bonnet boulder bracket branch brass brick bridge brook broom bucket buckle bugle butter button cabin cable cactus
camel canal candle canoe canyon carpet carrot castle cavern cedar cellar cello chalk chapel cherry chisel cider cinder
citron clarinet cliff clover cobbler comet compass copper coral cottage cradle crane crater creek cricket crystal
cushion dagger daisy depot desert diamond dock dolphin donkey drum dune eagle easel elbow ember engine falcon feather
fence fender ferry fiddle flagon flute forest fossil fountain fox galaxy garden garlic geyser ginger glacier goblet
granite grove hammer hammock harbor harp hatchet hazelnut helmet heron hinge honey horizon iceberg inkwell island
jacket jasmine jigsaw kettle kite ladder lagoon lantern lark lemon lentil lever lighthouse lily lobster locket magnet
magpie mallet mantle maple marsh meadow melon meteor mirror mitten monsoon mosaic muffin mural napkin nectar needle
nettle nutmeg oasis oboe orchard otter oyster paddle pebble pelican pepper piano pillow pine pocket pond poplar puzzle
quarry quill quilt rabbit raft ribbon river robin rocket saddle
""".split()  # noqa: SIM905
