// How Windows finds libeagle3.dll and the libraries that it needs, when a program elsewhere loads it as
// Python does: by its path, with its folder among those that are searched (os.add_dll_directory).
//     dll_test
//
// The program's own folder has the libraries, and Windows searches it. So a copy of the program in another
// folder does the test. It is linked to nothing but Windows.
#include "eagle3.h"

#include <windows.h>

#include <cstdio>
#include <cwchar>
#include <string>

namespace {

bool expect(bool ok, const char * what) {
    if (!ok) {
        std::fprintf(stderr, "%s (Windows' error %lu)\n", what, (unsigned long) GetLastError());
    }
    return ok;
}

// Of a library, or of the program itself.
std::wstring path_of(HMODULE module) {
    wchar_t path[32768] = L"";
    GetModuleFileNameW(module, path, 32768);
    return path;
}

std::wstring folder_of(const std::wstring & path) {
    return path.substr(0, path.find_last_of(L'\\'));
}

std::wstring quoted(const std::wstring & word) {
    return L"\"" + word + L"\"";
}

// In the copy. folder: of the libraries.
bool finds_them(const std::wstring & folder) {
    const std::wstring path = folder + L"\\libeagle3.dll";
    SetEnvironmentVariableW(L"PATH", L"");
    if (!expect(!LoadLibraryExW(path.c_str(), nullptr, 0), "its libraries are found without its folder") ||
        !expect(AddDllDirectory(folder.c_str()) != nullptr, "the folder cannot be added")) {
        return false;
    }
    HMODULE library = LoadLibraryExW(path.c_str(), nullptr, LOAD_LIBRARY_SEARCH_DEFAULT_DIRS);
    if (!expect(library != nullptr, "libeagle3.dll cannot be loaded")) {
        return false;
    }
    auto version = (decltype(&eagle3_abi_version)) (void *) GetProcAddress(library, "eagle3_abi_version");
    if (!expect(version && version() == EAGLE3_ABI_VERSION, "the version is not the header's")) {
        return false;
    }
    for (const wchar_t * name : {L"libllama.dll", L"libggml.dll", L"libggml-base.dll", L"libggml-cpu.dll"}) {
        HMODULE needed = GetModuleHandleW(name);
        if (!expect(needed && _wcsicmp(folder_of(path_of(needed)).c_str(), folder.c_str()) == 0,
                "a library that it needs comes from elsewhere")) {
            return false;
        }
    }
    return true;
}

// Runs the copy. Whether it ends with 0.
bool run(const std::wstring & program, const std::wstring & folder) {
    std::wstring command       = quoted(program) + L" " + quoted(folder);
    STARTUPINFOW start         = {};
    start.cb                   = sizeof(start);
    PROCESS_INFORMATION copy   = {};
    const std::wstring nowhere = folder_of(program);
    if (!expect(CreateProcessW(program.c_str(), command.data(), nullptr, nullptr, TRUE, 0, nullptr,
                    nowhere.c_str(), &start, &copy),
            "the copy does not start")) {
        return false;
    }
    DWORD code = 1;
    WaitForSingleObject(copy.hProcess, INFINITE);
    GetExitCodeProcess(copy.hProcess, &code);
    CloseHandle(copy.hThread);
    CloseHandle(copy.hProcess);
    return code == 0;
}

}  // namespace

int main() {
    int n            = 0;
    wchar_t ** words = CommandLineToArgvW(GetCommandLineW(), &n);
    if (n == 2) {
        return finds_them(words[1]) ? 0 : 1;
    }
    const std::wstring self         = path_of(nullptr);
    wchar_t temporary[MAX_PATH + 1] = L"";
    GetTempPathW(MAX_PATH + 1, temporary);
    const std::wstring nowhere = temporary + (L"eagle3-dll-" + std::to_wstring(GetCurrentProcessId()));
    const std::wstring copy    = nowhere + L"\\dll_test.exe";
    bool ok = expect(CreateDirectoryW(nowhere.c_str(), nullptr), "no folder can be made for the copy") &&
              expect(CopyFileW(self.c_str(), copy.c_str(), TRUE), "the copy cannot be written");
    ok      = ok && run(copy, folder_of(self));
    DeleteFileW(copy.c_str());
    RemoveDirectoryW(nowhere.c_str());
    if (ok) {
        std::puts("ok");
    }
    return ok ? 0 : 1;
}
