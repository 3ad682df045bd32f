# Copies HEADERS from the folder FROM to TO/sagebwd, where they include each other as sagebwd/... A
# file that does not change keeps its time.
file(GLOB_RECURSE old RELATIVE ${TO}/sagebwd ${TO}/sagebwd/*.h)
list(REMOVE_ITEM old ${HEADERS})
foreach(header ${old})
  file(REMOVE ${TO}/sagebwd/${header})
endforeach()
foreach(header ${HEADERS})
  file(READ ${FROM}/${header} text)
  string(REGEX REPLACE "#include \"(generator|cache|runtime)/" "#include \"sagebwd/\\1/" text
                       "${text}")
  file(CONFIGURE OUTPUT ${TO}/sagebwd/${header} CONTENT "${text}" @ONLY)
endforeach()
file(TOUCH ${TO}/written)
