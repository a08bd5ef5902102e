# cpack: what `cmake --install` lays down, as ringattn_VERSION_ARCHITECTURE.deb and as ringattn-VERSION-Linux.tar.gz.
set(CPACK_GENERATOR DEB TGZ)
set(CPACK_PACKAGE_NAME ringattn)
set(CPACK_PACKAGE_VENDOR ringattn)
set(CPACK_PACKAGE_CONTACT "The ringattn maintainers")  # as CITATION.cff has them: they have no address for mail
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}")
set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
# dpkg-shlibdeps finds what the program and the shared libraries need. The static libraries need headers, too.
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)  # and runs ldconfig when the package is installed
set(CPACK_DEBIAN_PACKAGE_SUGGESTS "libfmt-dev, libhwy-dev, libtomlplusplus-dev")
include(CPack)
