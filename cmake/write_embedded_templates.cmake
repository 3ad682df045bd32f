file(GLOB_RECURSE templates RELATIVE ${FOLDER} ${FOLDER}/*.cuh)
set(text "#include \"generator/templates.h\"\n\nnamespace sagebwd {\n\n"
         "const std::map<std::string_view, std::string_view>& embedded_templates() {\n"
         "  static const std::map<std::string_view, std::string_view> files = {\n")
string(CONCAT text ${text})
foreach(template ${templates})
  file(READ ${FOLDER}/${template} body)
  string(APPEND text "    {\"${template}\", R\"~~~~(${body})~~~~\"},\n")
endforeach()
string(APPEND text "  };\n  return files;\n}\n\n} // namespace sagebwd\n")
file(WRITE ${OUTPUT} "${text}")
